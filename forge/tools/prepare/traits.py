"""Traits of each document in a chunk, stored beside the tokens if a quality rule is set.

part-00007-train-documents.npy     per document: digest, and size of the text in bytes of UTF-8
part-00007-train-signatures.npy    per document: MinHash signature; empty unless near duplicates are left out
part-00007-train-metadata.jsonl    per document: a line with its metadata; empty without metadata keys
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from forge.observe.json_lines import finite
from forge.tools.prepare.quality import PERMUTATIONS, Quality, duplicates, signature

DOCUMENTS = np.dtype([("digest", "<u8"), ("bytes", "<u8")])


class Traits:
    """Digest, text size, signature and metadata of each document in one chunk and split. Empty without a quality rule."""

    def __init__(self, quality: Quality):
        self._quality, self._found = quality, array("Q")
        self._signatures: list[np.ndarray] = []
        self._metadata: list[str] = []

    def add(self, text: str, metadata: Mapping[str, Any], digest: bytes, size: int) -> None:
        if self._quality.is_on:
            self._found.extend((int.from_bytes(digest, "little"), size))
        if self._quality.duplicates == "near":
            self._signatures.append(signature(text))
        if self._quality.metadata:
            self._metadata.append(json.dumps(finite(metadata), sort_keys=True, default=str))

    def write(self, parts: Path, number: int, split: str) -> None:
        if not self._quality.is_on:
            return
        signatures = np.array(self._signatures, np.uint32).reshape(-1, PERMUTATIONS)
        lines = "".join(f"{line}\n" for line in self._metadata)
        contents: dict[str, Callable[[BinaryIO], object]] = {
            "documents.npy": lambda file: np.save(file, np.array(self._found, "<u8").view(DOCUMENTS)),
            "signatures.npy": lambda file: np.save(file, signatures),
            "metadata.jsonl": lambda file: file.write(lines.encode()),
        }
        # Synced, because the file that completes the part comes later.
        for name, write in contents.items():
            with open(_path(parts, number, split, name), "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())


def find_duplicates(
    parts: Path, count: int, splits: Sequence[str], quality: Quality
) -> tuple[dict[tuple[str, int], np.ndarray], dict[str, int]]:
    """Find duplicates over all parts. Return (split, chunk) -> mask of documents to keep, bool `[n]`, and reason -> count.

    The first of several duplicates is kept, in the order of `splits`, then of the chunks. Name the held-out split first:
    copies of its documents are then removed from the training data.
    """
    places = [(split, number) for split in splits for number in range(count)]
    tables = [_read(parts, number, split, "documents.npy") for split, number in places]
    if quality.duplicates == "none":
        return {place: np.ones(len(table), bool) for place, table in zip(places, tables, strict=True)}, {}
    signatures = None
    if quality.duplicates == "near":
        signatures = np.concatenate(
            [_read(parts, number, split, "signatures.npy") for split, number in places]
        )
    digests = np.concatenate([table["digest"] for table in tables])
    exact, near = duplicates(digests, signatures)
    ends = np.cumsum([len(table) for table in tables])[:-1]
    kept = dict(zip(places, np.split(~(exact | near), ends), strict=True))
    found = {"exact duplicates": int(exact.sum()), "near duplicates": int(near.sum())}
    return kept, {reason: number for reason, number in found.items() if number}


def text_bytes(parts: Path, number: int, split: str, kept: np.ndarray) -> int:
    """Return the text size, in bytes of UTF-8, of the documents to keep. kept: mask, bool `[documents]`."""
    return int(_read(parts, number, split, "documents.npy")["bytes"][kept].sum())


def metadata_lines(parts: Path, number: int, split: str, kept: np.ndarray) -> Iterator[bytes]:
    """Yield the metadata lines of the documents to keep. kept: mask, bool `[documents]`."""
    with open(_path(parts, number, split, "metadata.jsonl"), "rb") as lines:
        for line, wanted in zip(lines, kept, strict=True):
            if wanted:
                yield line


def select(tokens: np.ndarray, starts: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of the documents to keep, and the offsets of these documents in the returned tokens.

    starts: offsets of documents in `tokens`. kept: mask, bool `[documents]`.
    """
    if kept.all():
        return tokens, starts
    lengths = np.diff(starts, append=len(tokens))
    lengths_kept = lengths[kept]
    return tokens[np.repeat(kept, lengths)], np.cumsum(lengths_kept) - lengths_kept


def _read(parts: Path, number: int, split: str, what: str) -> np.ndarray:
    return np.load(_path(parts, number, split, what))


def _path(parts: Path, number: int, split: str, what: str) -> Path:
    return parts / f"part-{number:05d}-{split}-{what}"
