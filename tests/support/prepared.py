"""Make texts of random words, and read the documents of a prepared dataset."""

from pathlib import Path

import numpy as np

from forge.data.format import TokenDataset

WORDS = [f"w{n}" for n in range(2000)]


def text_of(seed: int, words: int = 200) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words).tolist())


def documents(folder: Path) -> list[str]:
    """Return the texts of a byte-level dataset."""
    data = TokenDataset(folder)
    ids, owners = data.read(0, data.tokens), data.document_ids(0, data.tokens)
    parts = np.split(ids, np.flatnonzero(np.diff(owners)) + 1)
    return [bytes(int(one) for one in part if one < 256).decode() for part in parts]
