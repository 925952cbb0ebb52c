"""Make a packing plan (forge/data/packing.py) of a dataset: assign documents to sequences of one length.

best_fit    Best-fit decreasing (Ding et al., arXiv 2404.10830). The documents of a window of consecutive documents are
            placed from longest to shortest, each into the fullest sequence with enough room.
document    One document per sequence.

A document longer than a sequence is cut into full sequences and a remainder. The remainder is packed like a document. A
sequence has train.seq_len + 1 tokens, because its last token is only a label.
"""

from __future__ import annotations

import glob
import os
import socket
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from forge.data.format import START_DTYPE, TokenDataset
from forge.data.packing import PIECES, SEQUENCES, PackingKind, PlanIndex, open_plan, plan_name
from forge.runtime.errors import UserError
from forge.runtime.files import sync_folder
from forge.runtime.remote import join
from forge.tools.prepare.writer import AtomicFile

WINDOW = 1 << 17
"""Number of documents packed at a time. The documents of a sequence are fewer than WINDOW documents apart."""


def pack(folder: Path, kind: PackingKind, seq_len: int, window: int = WINDOW) -> PlanIndex:
    """Make the packing plan of the dataset in `folder`, unless it exists. Return the plan's index.

    window: number of documents packed at a time; memory is proportional to it. Raises UserError if the dataset has no
    document of two tokens or more.
    """
    dataset = TokenDataset(folder)
    path = folder / f"{plan_name(kind, seq_len)}.json"
    if path.exists():
        return open_plan(folder, kind, seq_len, dataset.fingerprint, dataset.open_file).index
    _remove_leftovers(folder, path.stem)
    with ExitStack() as files:
        return _pack(dataset, kind, seq_len, window, files, path)


def _pack(
    dataset: TokenDataset, kind: PackingKind, seq_len: int, window: int, files: ExitStack, path: Path
) -> PlanIndex:
    """Make the plan at `path`, as `pack` does. files: closes the plan's files, and removes those that are not complete."""
    folder, name, capacity = path.parent, path.stem, seq_len + 1
    counts = dict.fromkeys(("sequences", "pieces", "tokens", "cut_documents", "cut_tokens", "lost_tokens"), 0)
    sequence_file, piece_file = (
        files.enter_context(_open(folder / f"{name}-{what}.bin")) for what in ("sequences", "pieces")
    )
    for starts, lengths in _documents(dataset, window):
        long = lengths > capacity
        counts["cut_documents"] += int(long.sum())
        counts["cut_tokens"] += int((lengths[long] - capacity).sum())
        pieces = cut(starts, lengths, capacity)
        if kind == "document":
            useful = pieces["tokens"] > 1  # a sequence of one token has no label
            counts["lost_tokens"] += int(pieces["tokens"][~useful].sum())
            pieces = pieces[useful]
            firsts = np.arange(len(pieces), dtype=SEQUENCES)
        else:
            pieces, firsts = best_fit(pieces, capacity)
        sequence_file.write((firsts + counts["pieces"]).astype(SEQUENCES).tobytes())
        piece_file.write(pieces.tobytes())
        counts["sequences"] += len(firsts)
        counts["pieces"] += len(pieces)
        counts["tokens"] += int(pieces["tokens"].sum())
    if not counts["sequences"]:
        raise UserError(f"{folder}: has no document of two tokens or more, so no sequence; prepare more text")
    sequence_file.write(np.array([counts["pieces"]], SEQUENCES).tobytes())
    content = counts | {
        "kind": kind,
        "seq_len": seq_len,
        "dataset": dataset.fingerprint,
        "padded": counts["sequences"] * capacity - counts["tokens"],
        "sequence_file": sequence_file.close(),
        "piece_file": piece_file.close(),
    }
    index = PlanIndex.model_validate(content)
    sync_folder(folder)
    index_file = files.enter_context(_open(path))
    index_file.write(index.model_dump_json(indent=1).encode() + b"\n")
    index_file.close()
    sync_folder(folder)
    return index


def describe_plan(index: PlanIndex, documents: int) -> str:
    """Return a sentence with a plan's numbers of sequences, cut documents, lost tokens and padding tokens."""
    room = index.tokens + index.padded
    lost = f", {index.lost_tokens:,} tokens lost" if index.lost_tokens else ""
    return (
        f"{index.sequences:,} sequences of {index.seq_len} by {index.kind}: {index.padded / room:.2%} padding, "
        f"{index.cut_documents:,} of {documents:,} documents cut ({index.cut_tokens / index.tokens:.2%} of the tokens "
        f"continue in a further sequence){lost}"
    )


def cut(starts: np.ndarray, lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Cut documents into pieces of at most `capacity` tokens. Return the pieces in order, an array of dtype PIECES.

    starts, lengths: first token and number of tokens of each document, int64 `[documents]`.
    """
    parts = -(-lengths // capacity)
    which = np.repeat(np.arange(len(lengths)), parts)
    place = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * capacity
    pieces = np.empty(len(which), PIECES)
    pieces["start"] = starts[which] + place
    pieces["tokens"] = np.minimum(lengths[which] - place, capacity)
    return pieces


def best_fit(pieces: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack pieces into sequences of `capacity` tokens by best-fit decreasing.

    Return the pieces, ordered by sequence, and the index of each sequence's first piece, int64 `[sequences]`.
    """
    order = np.argsort(-pieces["tokens"].astype(np.int64), kind="stable")
    sequence_of = np.empty(len(pieces), np.int64)
    spaces: list[int] = []  # distinct numbers of free tokens in a sequence, ascending
    with_space: dict[int, list[int]] = {}  # number of free tokens -> sequences
    count = 0
    for piece, length in zip(order.tolist(), pieces["tokens"][order].tolist(), strict=True):
        place = bisect_left(spaces, length)
        if place == len(spaces):
            sequence, space = count, capacity
            count += 1
        else:
            space = spaces[place]
            sequence = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[place]
        sequence_of[piece] = sequence
        if left := space - length:
            if left not in with_space:
                with_space[left] = []
                insort(spaces, left)
            with_space[left].append(sequence)
    by_sequence = order[np.argsort(sequence_of[order], kind="stable")]
    firsts = np.searchsorted(sequence_of[by_sequence], np.arange(count))
    return pieces[by_sequence], firsts


def _documents(dataset: TokenDataset, window: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (starts, lengths), both int64 `[documents]`, of up to `window` consecutive documents at a time."""
    waiting, first = np.zeros(0, np.int64), 0
    for shard in dataset.index.shards:
        if shard.documents:
            starts = np.fromfile(join(dataset.path, shard.document_file.name), START_DTYPE).astype(np.int64)
            waiting = np.concatenate([waiting, starts + first])
        first += shard.tokens
        while len(waiting) > window:
            yield waiting[:window], np.diff(waiting[: window + 1])
            waiting = waiting[window:]
    yield waiting, np.diff(waiting, append=dataset.tokens)


def _remove_leftovers(folder: Path, name: str) -> None:
    """Remove the temporary files of the plan `name` that ended processes of this host have left."""
    host = f".{socket.gethostname()}-"
    for path in folder.glob(f".{name}*{glob.escape(host)}*"):
        process = path.name.rpartition(host)[2]
        if process.isdecimal() and not _is_running(int(process)):
            path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process
    return True


def _open(path: Path) -> AtomicFile:
    """Open a file of a plan for writing.

    The temporary name is of this process, because others may be packing the same dataset. All write the same content.
    """
    return AtomicFile(path, f".{path.name}.{socket.gethostname()}-{os.getpid()}")
