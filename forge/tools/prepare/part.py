"""Make parts: a worker process tokenizes one chunk of the corpus into one part.

A part has tokens and document starts for each split, and a tally.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, TypeAlias, TypeVar

import numpy as np
from pydantic import BaseModel

from forge.data.format import token_dtype
from forge.data.tokenizer import Tokenizer, load_tokenizer
from forge.runtime.children import die_with_parent
from forge.runtime.errors import UserError
from forge.runtime.files import lock
from forge.runtime.terminal import printable
from forge.tools.prepare.documents import Bad, Document, read_documents
from forge.tools.prepare.inputs import Content, content_of, stamp_of
from forge.tools.prepare.long_text import TextPart, digest_of, read_part, slices
from forge.tools.prepare.quality import FilterFailed, Quality, add_counts
from forge.tools.prepare.sample import Piece
from forge.tools.prepare.traits import Traits

TRAIN, VALIDATION = "train", "validation"
NOTHING = Quality()
MAX_BAD_FRACTION = 0.01  # default of the allowed fraction of unreadable documents
SHOWN = 5  # unreadable documents named in a report
Chunk: TypeAlias = list[Piece | TextPart]
T = TypeVar("T")
tokenizer_of = lru_cache(maxsize=1)(load_tokenizer)  # load once per worker process


class Tally(BaseModel):
    """Counts for the documents of a chunk, or of all chunks.

    documents: all documents, readable or not. tokens: all tokens. unknown: number of unknown tokens among them. bad:
    number of unreadable documents; examples: the first of them. lost: the first files with an unknown number of
    unreadable documents. left_out: reason -> number of readable documents left out. text_bytes: split -> UTF-8 bytes.
    stamp, content: identity of a chunk's input (inputs.py). plan: digest of the options and of all chunks.
    """

    documents: int = 0
    tokens: int = 0
    unknown: int = 0
    bad: int = 0
    examples: list[Bad] = []
    lost: list[Bad] = []
    left_out: dict[str, int] = {}
    text_bytes: dict[str, int] = {TRAIN: 0, VALIDATION: 0}
    stamp: str = ""
    content: str = ""
    plan: str = ""

    def add(self, other: Tally) -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.unknown += other.unknown
        self.bad += other.bad
        self.examples = (self.examples + other.examples)[:SHOWN]
        self.lost = (self.lost + other.lost)[:SHOWN]
        add_counts(self.left_out, other.left_out.items())
        for split, size in other.text_bytes.items():
            self.text_bytes[split] += size

    def add_bad(self, document: Bad) -> None:
        document = document._replace(where=printable(document.where))  # a file name may not be UTF-8
        lost = [document] if document.many else []
        self.add(Tally(documents=1, bad=1, examples=[document], lost=lost))

    def require_readable(self, allowed: float, limit: str) -> None:
        """Print the first unreadable documents.

        Raises UserError if more than the fraction `allowed` of the documents is unreadable, or if the number of documents
        in an unreadable file is unknown. limit: describes the allowed fraction in the error message.
        """
        if not self.bad:
            return
        print(f"{self.bad} of {self.documents} documents are bad and left out:", file=sys.stderr)
        for where, reason, _ in self.examples:
            print(f"  {where}: {reason}", file=sys.stderr)
        if self.lost:
            where, reason, _ = self.lost[0]
            raise UserError(
                f"{where}: {reason}; an unknown number of documents is lost: repair the file, remove it from the input, "
                f"or name another --text-key; {limit}"
            )
        if self.bad > allowed * self.documents:
            raise UserError(
                f"{self.bad} of {self.documents} documents are bad; {limit}. The first is {self.examples[0].where}: "
                f"{self.examples[0].reason}. Repair the input, or name another --text-key"
            )


def split_of(digest: bytes, holdout: float) -> str:
    """Return the split of a document, "train" or "validation", from its digest. Copies have equal digests, so equal splits.

    holdout: fraction of documents in the validation split.
    """
    return VALIDATION if int.from_bytes(digest, "little") < holdout * 2**64 else TRAIN


@dataclass(frozen=True)
class Encoding:
    """Options for turning chunks into parts.

    parts: folder of the parts. plan: digest of the options and chunks. The other fields are as in `Request`.
    """

    tokenizer: str
    text_key: str
    holdout: float
    parts: Path
    quality: Quality = NOTHING
    plan: str = ""


def hash_chunk(_number: int, chunk: Chunk, how: Encoding) -> str:
    """Read the documents of a chunk and return their hash."""
    return content_of(chunk, tokenizer_of(how.tokenizer), how.text_key, how.quality.metadata)


def is_stamped(chunk: Chunk, number: int, how: Encoding) -> bool:
    """Return whether the part of a chunk was made by `how` from files with the current stamp."""
    path = part_path(how.parts, number)
    return was_made_by(how, number) and read_tally(path).stamp == stamp_of(chunk)


def was_made_by(how: Encoding, number: int) -> bool:
    """Return whether the part of chunk `number` exists and was made with the options and chunks of `how`."""
    path = part_path(how.parts, number)
    return path.exists() and read_tally(path).plan == how.plan


def _is_of(chunk: Chunk, number: int, how: Encoding) -> bool:
    """Return whether the part of a chunk exists and was made from the current documents.

    May read all documents of the chunk.
    """
    if is_stamped(chunk, number, how):
        return True
    tally = read_tally(part_path(how.parts, number)) if was_made_by(how, number) else None
    return tally is not None and tally.content == hash_chunk(number, chunk, how)


def encode_chunk(number: int, chunk: Chunk, how: Encoding) -> None:
    """Make the part of a chunk, unless it exists for the current input or another process is making it.

    Tokens are written to disk immediately, so memory does not grow with the chunk.
    """
    with open(how.parts / f"part-{number:05d}.lock", "w") as file:
        try:
            lock(file.fileno())
        except BlockingIOError:
            return
        if not _is_of(chunk, number, how):
            _make(number, chunk, how)


def for_chunks(
    work: Callable[[int, Chunk, Encoding], T],
    numbers: list[int],
    chunks: list[Chunk],
    how: Encoding,
    workers: int,
    advance: Callable[[int], None],
) -> dict[int, T]:
    """Call `work` on the chunks `numbers` in `workers` processes. Return a dict from chunk number to result.

    With one worker, call `work` in this process. advance: called with each finished chunk's number. Raises UserError if a
    worker was killed.
    """
    workers, results = min(workers, len(numbers)), dict[int, T]()
    if workers <= 1:
        for number in numbers:
            results[number] = work(number, chunks[number], how)
            advance(number)
    else:
        context = multiprocessing.get_context("spawn")  # forking a process with threads is unsafe
        # If this process is killed, its workers must not go on with the options of this run.
        with ProcessPoolExecutor(workers, context, initializer=die_with_parent) as pool:
            with _ignoring_interrupts():
                futures = {pool.submit(work, n, chunks[n], how): n for n in numbers}
            try:
                for future in as_completed(futures):
                    results[futures[future]] = future.result()
                    advance(futures[future])
            except BrokenProcessPool:
                raise UserError(
                    "a worker was killed (out of memory?); run the same command to continue from here, with fewer "
                    "--workers if memory is short",
                    exit_code=1,
                ) from None
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return results


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Ignore SIGINT in the body. Worker processes started in the body inherit this setting.

    A terminal sends Ctrl-C to all its processes. Workers ignore the signal, and the main process stops each worker after
    its current chunk. A handler that the worker installs would come too late for a Ctrl-C during the worker's start. Outside
    of the main thread, e.g. in a Dask worker, do nothing: other threads cannot set handlers, and a Dask worker has no
    terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _make(number: int, chunk: Chunk, how: Encoding) -> None:
    # Without its part file, an interrupted chunk counts as not made, even if its input changes back.
    part_path(how.parts, number).unlink(missing_ok=True)
    tokenizer = tokenizer_of(how.tokenizer)
    tally, starts = Tally(stamp=stamp_of(chunk), plan=how.plan), {}
    with ExitStack() as files:
        tokens = {
            split: _Tokens(tokenizer, files.enter_context(open(tokens_path(how.parts, number, split), "wb")))
            for split in (TRAIN, VALIDATION)
        }
        traits = {split: Traits(how.quality) for split in tokens}
        _encode(chunk, how, tokens, traits, tally)
        for split, found in tokens.items():
            starts[f"{split}_starts"] = found.finish()
            traits[split].write(how.parts, number, split)
            tally.tokens += found.count
            tally.unknown += found.unknown
    write_part(
        part_path(how.parts, number),
        starts | {"tally": np.frombuffer(tally.model_dump_json().encode(), np.uint8)},
    )


def _encode(
    chunk: Chunk, how: Encoding, tokens: dict[str, _Tokens], traits: dict[str, Traits], tally: Tally
) -> None:
    """Tokenize the documents of a chunk, and count them in `tally`. tokens, traits: receive the documents of each split.

    Raises UserError if the user's filter fails.
    """
    tokenizer, quality, text_key = tokenizer_of(how.tokenizer), how.quality, how.text_key
    content = Content()

    def hashed(texts: Iterable[str]) -> Iterator[str]:
        for text in texts:
            content.add(text)
            yield text

    for piece in chunk:
        if isinstance(piece, TextPart):
            tally.documents += piece.is_first
            tally.text_bytes[piece.split] += tokens[piece.split].add(
                hashed(read_part(piece, tokenizer)), begins=piece.is_first, ends=piece.is_last
            )
            continue
        for number, document in enumerate(read_documents(piece, text_key, quality.metadata), 1):
            content.add(document)
            if isinstance(document, Bad):
                tally.add_bad(document)
                continue
            tally.documents += 1
            metadata = document.metadata if isinstance(document, Document) else {}
            try:
                why = quality.reason(document, metadata, text_key)
            except FilterFailed as error:
                begin = f" from byte {piece.begin} on" if piece.begin else ""
                where = f"document {number} of {printable(piece.file.key)}{begin}"
                begins = f"which begins {document[:60]!r}"
                raise UserError(f"--filter {quality.filter}: failed on {where}, {begins}: {error}") from error
            if why is not None:
                add_counts(tally.left_out, [(why, 1)])
                continue
            digest = digest_of(document.encode())
            split = split_of(digest, how.holdout)
            size = tokens[split].add(slices(document, tokenizer))
            tally.text_bytes[split] += size
            traits[split].add(document, metadata, digest, size)
    tally.content = content.hexdigest()


class _Tokens:
    """Tokenize documents and write their ids to a file: [bos] ids [eos]. A marker is left out if the tokenizer lacks it.

    count: number of ids written. unknown: number of unknown ids among them.
    """

    def __init__(self, tokenizer: Tokenizer, file: BinaryIO):
        self._tokenizer, self._file = tokenizer, file
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._starts = array("q")
        self.count = self.unknown = 0

    def add(self, texts: Iterable[str], *, begins: bool = True, ends: bool = True) -> int:
        """Add consecutive parts of a document. Return the size of the added text in bytes of UTF-8.

        begins: the first part begins the document. ends: the last part ends the document.
        """
        text_bytes = 0
        if begins:
            self._starts.append(self.count)
            self._append([] if self._tokenizer.bos_id is None else [self._tokenizer.bos_id])
        for text in texts:
            ids = self._tokenizer.encode(text)
            self._append(ids)
            if self._tokenizer.unk_id is not None:
                self.unknown += ids.count(self._tokenizer.unk_id)
            text_bytes += len(text.encode())
        if ends and self._tokenizer.eos_id is not None:
            self._append([self._tokenizer.eos_id])
        return text_bytes

    def _append(self, ids: list[int]) -> None:
        self._file.write(np.array(ids, self._dtype).tobytes())
        self.count += len(ids)

    def finish(self) -> np.ndarray:
        """Sync the file to disk. Return the start offsets of the documents, int64 `[documents]`."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return np.array(self._starts, np.int64)


def write_part(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write `arrays` to `path` atomically: sync a temporary file to disk, then rename it."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def part_path(parts: Path, number: int) -> Path:
    """Return the path of the file with a part's document starts and tally. It is written last and completes the part."""
    return parts / f"part-{number:05d}.npz"


def tokens_path(parts: Path, number: int, split: str) -> Path:
    """Return the path of the token ids of one split in a part."""
    return parts / f"part-{number:05d}-{split}.bin"


def read_tally(path: Path) -> Tally:
    """Return the tally in the file `path` of a part."""
    with np.load(path) as part:
        return Tally.model_validate_json(part["tally"].tobytes())


def read_tokens(path: Path, vocab_size: int) -> np.ndarray:
    """Return the ids `[tokens]` in the file `path`, memory-mapped. dtype: smallest unsigned integer for the vocabulary."""
    dtype = token_dtype(vocab_size)
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
