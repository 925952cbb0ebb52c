"""Small datasets for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forge.data.format import TokenDataset
from forge.prepare.writer import ShardWriter


class Counting:
    """A source whose t-th token is t and whose documents are `length` tokens long."""

    name = fingerprint = "counting"

    def __init__(self, tokens: int, length: int = 10):
        self.tokens, self.length = tokens, length

    def read(self, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count)

    def document_ids(self, start: int, count: int) -> np.ndarray:
        documents = np.arange(start, start + count) // self.length
        return (documents - documents[0]).astype(np.int32)


def write_documents(folder: Path, lengths: list[int], *, vocab_size: int = 1000, **options) -> TokenDataset:
    """A dataset of documents of these lengths whose tokens count up from 0 modulo the vocabulary."""
    writer = ShardWriter(folder, vocab_size=vocab_size, tokenizer="test", **options)
    place = 0
    for length in lengths:
        writer.add_document(np.arange(place, place + length) % vocab_size)
        place += length
    writer.finish()
    return TokenDataset(folder)
