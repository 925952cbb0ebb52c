"""The load of every expert of every layer as a picture: a column for an expert, a row for a layer, the first on top.

White is an even share, blue less, red more; full colour at a quarter and at four times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CELL = 12  # pixels
_LESS, _EVEN, _MORE = np.array([[33, 102, 172], [247, 247, 247], [178, 24, 43]], dtype=float)


def expert_map(counts: Sequence[Sequence[float]]) -> NDArray[np.uint8]:
    """Choices of each expert, `[layers, experts]` -> pixels `[layers * CELL, experts * CELL, 3]`."""
    return colors(counts).repeat(CELL, 0).repeat(CELL, 1)


def colors(counts: Sequence[Sequence[float]]) -> NDArray[np.uint8]:
    """Choices of each expert, `[layers, experts]` -> red, green and blue of 0 to 255, `[layers, experts, 3]`."""
    load = np.asarray(counts, dtype=float)
    load = load / np.maximum(load.mean(axis=1, keepdims=True), 1e-9)
    doublings = np.clip(np.log2(np.maximum(load, 1e-9)), -2.0, 2.0)[..., None] / 2
    mixed = _EVEN + np.where(doublings < 0, (_LESS - _EVEN) * -doublings, (_MORE - _EVEN) * doublings)
    return mixed.round().astype(np.uint8)
