"""Turn text into token shards, in parallel. The result does not depend on the number of worker processes.

The corpus is cut into chunks by size alone. A worker tokenizes a chunk into a part. The part's last file marks it as
complete. Finally the parts are joined in order. After an interruption, the same command makes only the missing parts.

    OUTPUT/.parts/plan.json         options and chunks of the parts
    OUTPUT/.parts/part-00007-train.bin    tokens of chunk 7, one file per split
    OUTPUT/.parts/part-00007.npz    document starts and tally of chunk 7; its presence completes the part
    OUTPUT/ or OUTPUT/{train,validation}/    the datasets; when all are complete, .parts is removed
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from forge.data.format import INDEX, DatasetIndex, TokenDataset
from forge.data.packing import PackingKind
from forge.data.tokenizer import Tokenizer
from forge.observe.progress import ProgressLine, format_duration
from forge.runtime.errors import FAILED, UserError, lasting
from forge.runtime.files import is_url, lock
from forge.runtime.terminal import printable
from forge.tools.prepare.chunks import cut_corpus, identity_of, match_plan
from forge.tools.prepare.corpus import EXTENSIONS, Corpus, find_corpus
from forge.tools.prepare.inputs import stamp_of
from forge.tools.prepare.output import METADATA, locked, refuse_other_files, remove_parts
from forge.tools.prepare.pack import describe_plan, pack
from forge.tools.prepare.part import (
    MAX_BAD_FRACTION,
    NOTHING,
    TRAIN,
    VALIDATION,
    Chunk,
    Encoding,
    Tally,
    encode_chunk,
    for_chunks,
    hash_chunk,
    is_stamped,
    part_path,
    read_tally,
    read_tokens,
    tokenizer_of,
    tokens_path,
    was_made_by,
)
from forge.tools.prepare.quality import Quality, add_counts, decontaminate_content, filter_code, known_ngrams
from forge.tools.prepare.traits import find_duplicates, metadata_lines, select, text_bytes
from forge.tools.prepare.writer import ShardWriter

_PARTS = ".parts"
Kept: TypeAlias = dict[tuple[str, int], np.ndarray]
# Names of options in messages, where they differ from the keys.
_NAMES = {"filter_code": "code of --filter", "decontaminate_content": "content of --decontaminate"}
_REMEDY = "choose another --output, or delete this folder"


@dataclass(frozen=True)
class Request:
    """A request for datasets. holdout: fraction of documents for OUTPUT/validation; the others go to OUTPUT/train.

    With holdout 0, there is one dataset, in OUTPUT. max_bytes: bytes of text to sample; None: all. max_bad_fraction: allowed
    fraction of unreadable documents.
    """

    inputs: tuple[str, ...]
    tokenizer: str
    output: Path
    workers: int = 1
    holdout: float = 0.0
    max_bytes: int | None = None
    text_key: str = "text"
    extensions: tuple[str, ...] = EXTENSIONS
    max_bad_fraction: float = MAX_BAD_FRACTION
    part: tuple[int, int] | None = None
    """(k, n): tokenize only share k (from 1) of n shares of the chunks, and do not join parts."""
    packing: PackingKind | None = None
    seq_len: int = 0
    """Length of the sequences for `packing`, which applies to the training dataset."""
    quality: Quality = NOTHING

    @property
    def targets(self) -> dict[str, Path]:
        """The folder of each split's dataset, by split."""
        if not self.holdout:
            return {TRAIN: self.output}
        return {TRAIN: self.output / TRAIN, VALIDATION: self.output / VALIDATION}


def prepare(request: Request) -> list[Path]:
    """Make the datasets, unless they exist, and return their folders. With `request.part`, only make parts and return [].

    Raises UserError if the request or the input is invalid, or if the output has a dataset made with other options.
    """
    for cached in (tokenizer_of, known_ngrams):
        cached.cache_clear()  # the tokenizer's or the n-grams' files may have changed since the last call
    tokenizer = tokenizer_of(request.tokenizer)
    options = _options(request, tokenizer)
    done = _finished_targets(request, options)
    parts = request.output / _PARTS
    if len(done) == len(request.targets):
        _check_input(request, tokenizer)
        remove_parts(parts)  # exists if the last run was interrupted just before this removal
        for folder in request.targets.values():
            print(f"{folder}: already prepared, {_describe(TokenDataset(folder).index)}")
        return [] if request.part else _packed(request)  # the last call, without `part`, packs
    if tokenizer.bos_id is None and tokenizer.eos_id is None:
        print(
            f"warning: the tokenizer {request.tokenizer} has no token that begins or ends a document, so the token ids "
            "do not show where a document ends; data.document_mask = true separates documents in attention",
            file=sys.stderr,
        )
    refuse_other_files(
        [folder for split, folder in request.targets.items() if split not in done],
        parts,
        metadata=bool(request.quality.metadata),
    )
    chunks, corpus = _find_chunks(request, tokenizer)
    for note in corpus.notes():
        print(note, file=sys.stderr, flush=True)
    if request.part is not None:
        _prepare_part(request, request.part, options, chunks, parts)
        return []
    with locked(parts):
        plan = match_plan(parts, options, chunks)
        _encode_missing(request, chunks, plan, range(len(chunks)))
        tally = _check_tally(request, corpus, len(chunks), parts)
        found = identity_of(read_tally(part_path(parts, number)) for number in range(len(chunks)))
        for split in done:  # datasets finished by an interrupted run
            _require_input(request.targets[split], found)
        kept = _choose(request, parts, len(chunks), tally)
        for split, folder in request.targets.items():
            if split not in done:
                writer = _join(folder, split, tokenizer, parts, len(chunks), kept, request.quality)
                origin: dict[str, Any] = {"options": options, "input": found}
                origin |= {"unknown_tokens": tally.unknown, "left_out": tally.left_out}
                index = writer.finish(tally.text_bytes[split], origin)
                print(f"{folder}: {_describe(index)}")
        remove_parts(parts)
    return _packed(request)


def _packed(request: Request) -> list[Path]:
    """Make the packing plan of the training dataset, if requested. Return the folders of the datasets."""
    if request.packing is not None:
        folder = request.targets[TRAIN]
        index = pack(folder, request.packing, request.seq_len)
        print(f"{folder}: {describe_plan(index, TokenDataset(folder).documents)}")
    return list(request.targets.values())


def _prepare_part(
    request: Request, part: tuple[int, int], options: dict[str, Any], chunks: list[Chunk], parts: Path
) -> None:
    """Tokenize this machine's share of the chunks. part: (number of the share from 1, number of shares).

    All machines write to one folder. A later call without `request.part` joins the parts into datasets.
    """
    number, count = part
    with locked(parts, shared=True):
        with open(parts / "plan.lock", "w") as file:
            lock(file.fileno(), wait=True)
            plan = match_plan(parts, options, chunks, shared=True)
        _encode_missing(request, chunks, plan, range(number - 1, len(chunks), count), all_here=False)
    done = sum(part_path(parts, chunk).exists() for chunk in range(len(chunks)))
    print(
        f"{parts}: part {number} of {count} is done; of all parts, {done} of {len(chunks)} chunks are done. "
        "The same command without --part makes the missing chunks and joins all parts"
    )


def _options(request: Request, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return all options that influence the result. dataset.json records them, so that a later request can be compared."""
    quality = request.quality
    options = {
        "input": [
            lasting(path) if is_url(path) else printable(os.path.abspath(path)) for path in request.inputs
        ],
        "tokenizer": tokenizer.fingerprint,
        "holdout": request.holdout,
        "max_bytes": request.max_bytes,
        "text_key": request.text_key,
        "extensions": list(request.extensions),
        "quality": quality.options(),
    }
    if quality.filter:
        options["filter_code"] = filter_code(quality.filter)
    if quality.decontaminate:
        options["decontaminate_content"] = decontaminate_content(quality, request.text_key)
    return options


def _finished_targets(request: Request, options: dict[str, Any]) -> set[str]:
    """Return the splits with a finished dataset. Raises UserError if a folder has a dataset of other options."""
    finished = set()
    for folder in (request.output, request.output / TRAIN, request.output / VALIDATION):
        if not (folder / INDEX).exists():
            continue
        split = next((split for split, target in request.targets.items() if target == folder), None)
        before = {"quality": None} | TokenDataset(folder).index.origin.get("options", dict.fromkeys(options))
        if before.get("input") is not None:  # older versions kept the secrets of URLs
            before["input"] = [lasting(path) for path in before["input"]]
        # An option missing in the dataset is newer than the dataset, and does not count as a difference.
        differing = (
            [key for key in before if key in options and before[key] != options[key]]
            if split
            else ["holdout"]
        )
        if split is None or differing:
            names = ", ".join(_NAMES.get(key, key) for key in differing)
            raise UserError(f"{folder}: already holds a dataset prepared with another {names}; {_REMEDY}")
        finished.add(split)
    return finished


def _require_input(folder: Path, found: dict[str, Any]) -> None:
    """Raise UserError if the dataset in `folder` was made from other input. found: the identity of the current input."""
    before = TokenDataset(folder).index.origin.get("input", found)
    if before["version"] == found["version"] and before["content"] != found["content"]:
        raise UserError(
            f"{folder}: already holds a dataset. It was not made from the present content of --input; {_REMEDY}"
        )


def _check_input(request: Request, tokenizer: Tokenizer) -> None:
    """Raise UserError if finished datasets were made from other content than the current input.

    Documents are read only if a file's stamp has changed. If the input no longer exists, nothing is compared.
    """
    if gone := [path for path in request.inputs if not is_url(path) and not os.path.exists(path)]:
        print(f"--input {gone[0]}: does not exist, so it is not compared with the dataset", file=sys.stderr)
        return
    before = [TokenDataset(folder).index.origin.get("input", {}) for folder in request.targets.values()]
    if {} in before:
        return  # a dataset of an older version has no identity of its input
    chunks, _ = _find_chunks(request, tokenizer)
    tallies = [Tally(stamp=stamp_of(chunk)) for chunk in chunks]
    if all(one["stamp"] == identity_of(tallies)["stamp"] for one in before):
        return
    how = _encoding(request)
    hashes = for_chunks(
        hash_chunk, list(range(len(chunks))), chunks, how, request.workers, lambda number: None
    )
    for number, tally in enumerate(tallies):
        tally.content = hashes[number]
    for folder in request.targets.values():
        _require_input(folder, identity_of(tallies))


def _find_chunks(request: Request, tokenizer: Tokenizer) -> tuple[list[Chunk], Corpus]:
    made = [folder / METADATA for folder in request.targets.values()] if request.quality.metadata else []
    corpus = find_corpus(
        request.inputs, request.extensions, request.max_bytes, request.text_key, without=made
    )
    # Quality rules judge whole texts, so with these no text is cut.
    return cut_corpus(corpus, tokenizer, request.holdout, cut_texts=not request.quality.is_on)


def _encoding(request: Request, plan: str = "") -> Encoding:
    parts = request.output / _PARTS
    return Encoding(request.tokenizer, request.text_key, request.holdout, parts, request.quality, plan)


def _encode_missing(
    request: Request, chunks: list[Chunk], plan: str, wanted: Iterable[int], *, all_here: bool = True
) -> None:
    """Make the missing parts of the chunks `wanted`. plan: the result of `match_plan`.

    all_here: raise UserError (exit 1) if another process is making a part. False: that process completes it.
    """
    how = _encoding(request, plan)
    missing = [number for number in wanted if not is_stamped(chunks[number], number, how)]
    sizes = {number: sum(piece.size for piece in chunks[number]) for number in missing}
    progress, done = ProgressLine("tokenized", sum(sizes.values())), 0

    def advance(number: int) -> None:
        nonlocal done
        done += sizes[number]
        progress.update(done)

    for_chunks(encode_chunk, missing, chunks, how, request.workers, advance)
    if all_here and (others := [number for number in missing if not was_made_by(how, number)]):
        raise UserError(
            f"{how.parts}: another process is making chunk {others[0] + 1} of {len(chunks)}, perhaps one left by a killed "
            "run; wait until it has ended, then run the same command again",
            FAILED,
        )
    seconds = progress.close()
    if done:
        rate = f"{done / 1e6 / seconds:.1f} MB/s"
        print(f"tokenized {done / 1e6:.1f} MB in {format_duration(seconds)} ({rate})", file=sys.stderr)


def _check_tally(request: Request, corpus: Corpus, count: int, parts: Path) -> Tally:
    """Return the sum of all tallies, and print warnings. Raises UserError for too many bad documents or an empty split."""
    tally = Tally()
    for bad in corpus.unreadable:
        tally.add_bad(bad)
    for number in range(count):
        found = read_tally(part_path(parts, number))
        tally.add(found)
        if found.lost:
            part_path(
                parts, number
            ).unlink()  # retry next time: the file may then be readable, although its stamp is unchanged
    if tally.unknown:
        print(
            f"warning: {tally.unknown:,} of {tally.tokens:,} tokens ({tally.unknown / tally.tokens:.2%}) are the unknown "
            "token: the tokenizer cannot encode this text, so the text is lost",
            file=sys.stderr,
        )
    tally.require_readable(
        request.max_bad_fraction,
        f"--max-bad-fraction allows {request.max_bad_fraction:g} (finished chunks are kept)",
    )
    for split, folder in request.targets.items():
        if not tally.text_bytes[split]:
            hint = f", or change --holdout ({request.holdout:g})" if request.holdout else ""
            hint += f", or increase --max-bytes ({request.max_bytes})" if request.max_bytes else ""
            raise UserError(f"{folder}: no document with text is left; give more --input{hint}")
    return tally


def _choose(request: Request, parts: Path, count: int, tally: Tally) -> Kept:
    """Find duplicates. Return (split, chunk) -> mask of documents to keep; empty without quality rules.

    Updates `tally`, and prints the number of documents left out by reason.
    """
    if not request.quality.is_on:
        return {}
    splits = [split for split in (VALIDATION, TRAIN) if split in request.targets]
    kept, found = find_duplicates(parts, count, splits, request.quality)
    add_counts(tally.left_out, found.items())
    for split in splits:
        tally.text_bytes[split] = sum(
            text_bytes(parts, number, split, kept[split, number]) for number in range(count)
        )
        if not tally.text_bytes[split]:
            raise UserError(
                f"{request.targets[split]}: no document is left without the duplicates of other documents; give more "
                "--input, or change --duplicates or --holdout"
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
        if metadata is not None:
            metadata.flush()
            os.fsync(metadata.fileno())
    return writer


def _describe(index: DatasetIndex) -> str:
    return (
        f"{index.tokens:,} tokens, {index.documents:,} documents, {index.text_bytes / 1e6:.1f} MB of text "
        f"({index.text_bytes / index.tokens:.2f} bytes per token)"
    )
