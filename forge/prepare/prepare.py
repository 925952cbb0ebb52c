"""Text -> token shards, in parallel; the result does not depend on the number of worker processes.

The corpus is cut into chunks by size alone. A worker tokenizes a chunk into one part file, which gets its final name when
it is complete; when all parts exist they are joined in order. So after any interruption the same command does only what
is missing.

    OUTPUT/.parts/plan.json         the options and the corpus that the parts belong to
    OUTPUT/.parts/part-00007-train.bin    tokens of chunk 7, for each split
    OUTPUT/.parts/part-00007.npz    where its documents start, and a tally; a chunk that has it is complete
    OUTPUT/ or OUTPUT/{train,validation}/    the datasets; .parts is removed when all are complete
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from forge.data.format import INDEX, DatasetIndex, TokenDataset
from forge.data.packing import Kind
from forge.data.tokenizer import Tokenizer
from forge.errors import UserError
from forge.files import replace_atomically
from forge.observe.progress import ProgressLine, format_duration
from forge.prepare.corpus import EXTENSIONS, Corpus, find_corpus
from forge.prepare.documents import Bad
from forge.prepare.long_text import TextPart, check_text, text_parts
from forge.prepare.pack import describe_plan, pack
from forge.prepare.part import (
    NOTHING,
    TRAIN,
    VALIDATION,
    Chunk,
    Encoding,
    Tally,
    encode_chunks,
    part_path,
    read_tokens,
    split_of,
    tokenizer_of,
    tokens_path,
)
from forge.prepare.quality import Quality, add_counts
from forge.prepare.sample import Piece
from forge.prepare.traits import find_duplicates, metadata_lines, select, text_bytes
from forge.prepare.writer import ShardWriter
from forge.remote import is_url, version_of

_PARTS = ".parts"
METADATA = "metadata.jsonl"
Kept: TypeAlias = dict[tuple[str, int], np.ndarray]
_VERSION = 3  # of the way in which a corpus is cut into parts


@dataclass(frozen=True)
class Request:
    """What to prepare. `holdout`: the share of documents that go to OUTPUT/validation; the others go to OUTPUT/train."""

    inputs: tuple[str, ...]
    tokenizer: str
    output: Path
    workers: int = 1
    holdout: float = 0.0
    max_bytes: int | None = None
    text_key: str = "text"
    extensions: tuple[str, ...] = EXTENSIONS
    max_bad_fraction: float = 0.01
    part: tuple[int, int] | None = None
    """(k, n): tokenize only the k-th (from 1) of n shares of the chunks, and join nothing."""
    packing: Kind | None = None
    seq_len: int = 0
    """The plan of a packing that the dataset for training gets, for sequences of this length."""
    quality: Quality = NOTHING

    @property
    def targets(self) -> dict[str, Path]:
        """Split -> folder."""
        if not self.holdout:
            return {TRAIN: self.output}
        return {TRAIN: self.output / TRAIN, VALIDATION: self.output / VALIDATION}


def prepare(request: Request) -> list[Path]:
    """Make the datasets and return their folders; does nothing if they exist.

    Raises UserError for what the user can correct.
    """
    tokenizer_of.cache_clear()  # the file may have changed since the last call
    tokenizer = tokenizer_of(request.tokenizer)
    options = _options(request, tokenizer)
    done = _finished_targets(request, options)
    parts = request.output / _PARTS
    if len(done) == len(request.targets):
        shutil.rmtree(parts, ignore_errors=True)  # left if the last run was interrupted at its very end
        for folder in request.targets.values():
            print(f"{folder}: already prepared, {_describe(TokenDataset(folder).index)}")
        return _packed(request)
    if tokenizer.bos_id is None and tokenizer.eos_id is None:
        print(
            f"warning: the tokenizer {request.tokenizer} has no token that begins or ends a document, so nothing in the data "
            "marks where one ends and the next begins; data.document_mask = true keeps them apart in attention",
            file=sys.stderr,
        )
    corpus = find_corpus(request.inputs, request.extensions, request.max_bytes, request.text_key)
    for note in corpus.notes():
        print(note, file=sys.stderr, flush=True)
    # What is decided by a text as a whole needs it in one piece.
    chunks, corpus = _cut(corpus, tokenizer, request.holdout, cut_texts=not request.quality.is_on)
    if request.part is not None:
        _prepare_part(request, request.part, options, chunks, parts)
        return []
    with _locked(parts):
        _match_plan(parts, options, chunks)
        _encode_missing(request, chunks, parts, range(len(chunks)))
        tally = _check_tally(request, corpus, len(chunks), parts)
        kept = _choose(request, parts, len(chunks), tally)
        for split, folder in request.targets.items():
            if split not in done:
                writer = _join(folder, split, tokenizer, parts, len(chunks), kept, request.quality)
                origin = {"options": options, "unknown_tokens": tally.unknown, "left_out": tally.left_out}
                index = writer.finish(tally.text_bytes[split], origin)
                print(f"{folder}: {_describe(index)}")
        shutil.rmtree(parts)
    return _packed(request)


def _packed(request: Request) -> list[Path]:
    """Make the plan that the request asks for. Returns the folders of the datasets."""
    if request.packing is not None:
        folder = request.targets[TRAIN]
        index = pack(folder, request.packing, request.seq_len)
        print(f"{folder}: {describe_plan(index, TokenDataset(folder).documents)}")
    return list(request.targets.values())


def _prepare_part(
    request: Request, part: tuple[int, int], options: dict[str, Any], chunks: list[Chunk], parts: Path
) -> None:
    """Do this machine's share of the chunks. All machines write to one folder; the same call without `part` joins."""
    number, count = part
    with _locked(parts, shared=True):
        with open(parts / "plan.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _match_plan(parts, options, chunks, shared=True)
        _encode_missing(request, chunks, parts, range(number - 1, len(chunks), count))
    done = sum(part_path(parts, chunk).exists() for chunk in range(len(chunks)))
    print(
        f"{parts}: part {number} of {count} is done, and {done} of {len(chunks)} chunks in all; the same command "
        "without --part makes what is missing and joins them"
    )


def _options(request: Request, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the result depends on; kept in dataset.json, so that the result of another request is not mistaken for it."""
    return {
        "input": [path if is_url(path) else os.path.abspath(path) for path in request.inputs],
        "tokenizer": tokenizer.fingerprint,
        "holdout": request.holdout,
        "max_bytes": request.max_bytes,
        "text_key": request.text_key,
        "extensions": list(request.extensions),
        "quality": request.quality.options(),
    }


def _finished_targets(request: Request, options: dict[str, Any]) -> set[str]:
    """The splits that exist already. UserError where a folder holds another dataset."""
    finished = set()
    for folder in (request.output, request.output / TRAIN, request.output / VALIDATION):
        if not (folder / INDEX).exists():
            continue
        split = next((split for split, target in request.targets.items() if target == folder), None)
        before = {"quality": None} | TokenDataset(folder).index.origin.get("options", dict.fromkeys(options))
        # An option that the version of forge which wrote the dataset did not have yet says nothing against it.
        differing = (
            [key for key in before if key in options and before[key] != options[key]]
            if split
            else ["holdout"]
        )
        if split is None or differing:
            raise UserError(
                f"{folder}: already holds a dataset prepared with another {', '.join(differing)}; "
                "choose another --output or delete it"
            )
        finished.add(split)
    return finished


def _cut(corpus: Corpus, tokenizer: Tokenizer, holdout: float, cut_texts: bool) -> tuple[list[Chunk], Corpus]:
    """Cut into chunks of about 1/256 of the whole, at least 1 MB (a chunk has a fixed cost) and at most 128 MB.

    A text file, which is one document, is cut where that does not change its tokens. A compressed file, which is read from
    its start, is not. Large text files that cannot be read become unreadable ones of the corpus that is returned.
    """
    chunk_bytes = min(max(sum(piece.size for piece in corpus.pieces) // 256, 1 << 20), 128 << 20)
    chunks: list[Chunk] = [[]]
    room = chunk_bytes
    bad: list[Bad] = []
    for piece in corpus.pieces:
        parts: Iterable[Piece | TextPart] = [piece]
        if piece.file.kind != "text" or not piece.is_whole:
            parts = [piece] if piece.file.compression else piece.parts(chunk_bytes)
        elif piece.size > chunk_bytes and not piece.file.compression and tokenizer.can_cut and cut_texts:
            digest = check_text(piece.file)
            if isinstance(digest, Bad):
                bad.append(digest)
                continue
            parts = text_parts(piece.file, chunk_bytes, split_of(digest, holdout))
        for part in parts:
            if chunks[-1] and part.size > room:
                chunks.append([])
                room = chunk_bytes
            chunks[-1].append(part)
            room -= part.size
    return chunks, replace(corpus, unreadable=corpus.unreadable + bad)


@contextmanager
def _locked(parts: Path, shared: bool = False) -> Iterator[None]:
    """Allow one program at a time per output folder, or several with `shared`. The kernel releases the lock at their end."""
    try:
        parts.mkdir(parents=True, exist_ok=True)
        lock = open(parts / "lock", "w")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"--output {parts.parent}: cannot be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"--output {parts.parent}: another prepare_data is writing to it") from None
        yield


def _match_plan(parts: Path, options: dict[str, Any], chunks: list[Chunk], shared: bool = False) -> None:
    """Keep the parts of an interrupted run only if it had these chunks and these options; `shared`: refuse others."""
    digest = hashlib.sha256()
    for number, (file, *places) in ((n, piece) for n, chunk in enumerate(chunks) for piece in chunk):
        modified = version_of(file.path) if is_url(file.path) else os.stat(file.path).st_mtime_ns
        digest.update(os.fsencode(f"{number}\0{tuple(file)}\0{places}\0{modified}\n"))
    content = {"options": options, "chunks": digest.hexdigest(), "version": _VERSION}
    plan = json.dumps(content, sort_keys=True).encode()
    path, existing = parts / "plan.json", list(parts.glob("part-*.npz"))
    if path.exists() and path.read_bytes() == plan:
        if existing:
            print(f"continuing an interrupted run: {len(existing)} chunks are done", file=sys.stderr)
        return
    if existing and shared:
        raise UserError(
            f"{parts}: holds parts that were made with other options or another input; prepare those first, or remove it"
        )
    if existing:
        print("the options or the input changed since a run was interrupted: starting over", file=sys.stderr)
    for part in existing:
        part.unlink()
    replace_atomically(path, plan)


def _encode_missing(request: Request, chunks: list[Chunk], parts: Path, wanted: Iterable[int]) -> None:
    missing = [number for number in wanted if not part_path(parts, number).exists()]
    sizes = {number: sum(piece.size for piece in chunks[number]) for number in missing}
    progress, done = ProgressLine("tokenized", sum(sizes.values())), 0
    how = Encoding(request.tokenizer, request.text_key, request.holdout, parts, request.quality)

    def advance(number: int) -> None:
        nonlocal done
        done += sizes[number]
        progress.update(done)

    encode_chunks(missing, chunks, how, request.workers, advance)
    seconds = progress.close()
    if done:
        rate = f"{done / 1e6 / seconds:.1f} MB/s"
        print(f"tokenized {done / 1e6:.1f} MB in {format_duration(seconds)} ({rate})", file=sys.stderr)


def _check_tally(request: Request, corpus: Corpus, count: int, parts: Path) -> Tally:
    """Sum and report the tallies of all parts. UserError where too much is bad or a split would be empty."""
    tally = Tally()
    for bad in corpus.unreadable:
        tally.add_bad(bad)
    for number in range(count):
        with np.load(part_path(parts, number)) as part:
            found = Tally.model_validate_json(part["tally"].tobytes())
        tally.add(found)
        if found.lost:
            part_path(parts, number).unlink()  # the file may be readable next time although it did not change
    if tally.bad:
        print(f"{tally.bad} of {tally.documents} documents are bad and left out:", file=sys.stderr)
        for where, reason, _ in tally.examples:
            print(f"  {where}: {reason}", file=sys.stderr)
    if tally.unknown:
        print(
            f"warning: {tally.unknown:,} of {tally.tokens:,} tokens ({tally.unknown / tally.tokens:.2%}) are unknown ones: "
            "text for which the tokenizer has no tokens, and which is lost",
            file=sys.stderr,
        )
    if tally.lost:
        where, reason, _ = tally.lost[0]
        raise UserError(
            f"{where}: {reason}; an unknown number of documents is lost with it, so no --max-bad-fraction covers it: "
            "repair it, or remove it from the input (finished chunks are kept)"
        )
    if tally.bad > request.max_bad_fraction * tally.documents:
        raise UserError(
            f"{tally.bad} of {tally.documents} documents are bad, the first {tally.examples[0].where}: "
            f"{tally.examples[0].reason}; --max-bad-fraction allows {request.max_bad_fraction:g}: "
            "repair the input, or raise it (finished chunks are kept)"
        )
    for split, folder in request.targets.items():
        if not tally.text_bytes[split]:
            hint = f", or another --holdout than {request.holdout:g}" if request.holdout else ""
            hint += f", or more --max-bytes than {request.max_bytes}" if request.max_bytes else ""
            raise UserError(f"{folder}: no document with text is left; give more --input{hint}")
    return tally


def _choose(request: Request, parts: Path, count: int, tally: Tally) -> Kept:
    """Find the documents that are kept of each split and chunk; what is left out is counted in `tally` and printed."""
    if not request.quality.is_on:
        return {}
    splits = [split for split in (VALIDATION, TRAIN) if split in request.targets]
    kept, found = find_duplicates(parts, count, splits, request.quality)
    add_counts(tally.left_out, found.items())
    for split in splits:
        tally.text_bytes[split] = sum(
            text_bytes(parts, number, split, kept[split, number]) for number in range(count)
        )
    for reason, number in sorted(tally.left_out.items()):
        print(f"{number:,} of {tally.documents:,} documents left out: {reason}", file=sys.stderr)
    return kept


def _join(
    folder: Path, split: str, tokenizer: Tokenizer, parts: Path, count: int, kept: Kept, quality: Quality
) -> ShardWriter:
    writer = ShardWriter(folder, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.fingerprint)
    with ExitStack() as stack:
        metadata = stack.enter_context(open(folder / METADATA, "wb")) if quality.metadata else None
        for number in range(count):
            with np.load(part_path(parts, number)) as part:
                starts = part[f"{split}_starts"]
            tokens = read_tokens(tokens_path(parts, number, split), tokenizer.vocab_size)
            if kept:
                tokens, starts = select(tokens, starts, kept[split, number])
            writer.append(tokens, starts)
            if metadata is not None:
                metadata.writelines(metadata_lines(parts, number, split, kept[split, number]))
    return writer


def _describe(index: DatasetIndex) -> str:
    return (
        f"{index.tokens:,} tokens, {index.documents:,} documents, {index.text_bytes / 1e6:.1f} MB of text "
        f"({index.text_bytes / index.tokens:.2f} bytes per token)"
    )
