"""Documents that are shorter than any shard of a sequence."""

from __future__ import annotations

import numpy as np

from forge.data.synthetic import SyntheticSource


def short_documents(self: SyntheticSource, start: int, count: int) -> np.ndarray:
    """Return ids of documents of 1, 2 and 3 tokens in turn. Most chunks, and most rows of two chunks, share no document."""
    borders = np.isin(np.arange(count) % 6, (1, 3, 0))
    borders[0] = False
    return np.cumsum(borders, dtype=np.int32)
