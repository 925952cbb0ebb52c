"""`PackedDataset`: the global sequence of training samples, each a window of a token stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forge.data.mixture import Mixture
from forge.data.permutation import Permutation, key_of
from forge.data.sources import Source, count_windows


class PackedDataset:
    """`dataset[i]` is global sample i, for any i >= 0.

    Window k of a source of T tokens is tokens k S ... k S + S inclusive: S inputs and, shifted by one, S labels. There
    are (T - 1) // S windows, so every token but the first is a label once, except a rest shorter than S.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        seq_len: int,
        seed: int,
        block: int = 1024,
        document_mask: bool = False,
    ):
        self.sources = list(sources)
        self.weights = list(weights)
        self.seq_len = seq_len
        self.seed = seed
        self.document_mask = document_mask
        self.mixture = Mixture(weights, [count_windows(source, seq_len) for source in sources], seed, block)

    def __getitem__(self, global_sample: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return tokens `[seq_len + 1]`, and with `document_mask` each token's document, int32 `[seq_len + 1]`, from 0."""
        source, _, window = self.mixture.locate(global_sample)
        return read_window(self.sources[source], window, self.seq_len, self.document_mask)

    def fingerprint(self) -> dict[str, Any]:
        """Return what the order and content of samples depend on, as flat JSON: equal ones give the same samples."""
        fingerprint: dict[str, Any] = {
            "run.seed": self.seed,
            "train.seq_len": self.seq_len,
            "data.mixture_block": self.mixture.block,
        }
        for number, (source, weight) in enumerate(zip(self.sources, self.weights, strict=True)):
            fingerprint[f"data.sources[{number}].path"] = source.fingerprint
            fingerprint[f"data.sources[{number}].weight"] = float(weight)
        return fingerprint


def read_window(
    source: Source, window: int, seq_len: int, documents: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return tokens `[seq_len + 1]` of a window, fewer at the end of the source, and if requested their documents, int32."""
    start = window * seq_len
    count = min(seq_len + 1, source.tokens - start)
    return source.read(start, count), source.document_ids(start, count) if documents else None


def held_out_windows(windows: int, sequences: int) -> Sequence[int]:
    """Return which of a held-out source's `windows` an evaluation of `sequences` of them reads, ascending.

    They are drawn by one fixed permutation, because neighbours, such as the first ones, are about a few documents only. They
    depend on both numbers alone: all runs, seeds, steps and layouts read the same, and fewer sequences are some of them.
    """
    if sequences >= windows:
        return range(windows)
    permutation = Permutation(windows, key_of("held-out windows"))
    return sorted(permutation(i) for i in range(sequences))
