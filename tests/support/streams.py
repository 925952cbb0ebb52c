"""Small datasets for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge.batch import Batch
from forge.data.dataset import PackedDataset
from forge.data.format import TokenDataset
from forge.data.loader import Loader
from forge.data.synthetic import SyntheticSource
from forge.tools.prepare.writer import ShardWriter

S, GLOBAL = 16, 8


class Counting:
    """A source with token t at position t, in documents of `length` tokens."""

    name = fingerprint = "counting"

    def __init__(self, tokens: int, length: int = 10):
        self.tokens, self.length = tokens, length

    def read(self, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count)

    def document_ids(self, start: int, count: int) -> np.ndarray:
        documents = np.arange(start, start + count) // self.length
        return (documents - documents[0]).astype(np.int32)


def write_documents(folder: Path, lengths: list[int], *, vocab_size: int = 1000, **options) -> TokenDataset:
    """Write documents of `lengths`, with token ids counting up from 0 modulo the vocabulary."""
    writer = ShardWriter(folder, vocab_size=vocab_size, tokenizer="test", **options)
    place = 0
    for length in lengths:
        writer.append(np.arange(place, place + length) % vocab_size, np.zeros(1, np.int64))
        place += length
    writer.finish()
    return TokenDataset(folder)


class Numbers:
    """A source of `windows` windows of one token, identified by name. Its tokens are never read."""

    def __init__(self, name: str, windows: int):
        self.name = self.fingerprint = name
        self.tokens = windows + 1


def located(
    weights: Sequence[float], sizes: Sequence[int], samples: Iterable[int], **options: Any
) -> list[tuple[int, int, int]]:
    """Return (source, epoch, window) of global samples, for sources of `sizes` windows."""
    sources = [Numbers(str(number), size) for number, size in enumerate(sizes)]
    dataset = PackedDataset(sources, weights, 1, **options)
    return [(int(name), epoch, window) for name, epoch, window in map(dataset.locate, samples)]


def make_dataset(**options: Any) -> PackedDataset:
    return PackedDataset([Counting(1000), SyntheticSource(0, 300)], [1, 3], S, seed=0, block=32, **options)


def first_batches(count: int, dataset: PackedDataset | None = None, **options: Any) -> list[Batch]:
    loader = Loader(
        dataset or make_dataset(), **{"global_batch_size": GLOBAL, "rank": 0, "ranks": 1} | options
    )
    try:
        return [next(loader) for _ in range(count)]
    finally:
        loader.close()
