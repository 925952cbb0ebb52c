"""Division of a token stream into samples: equal windows, or the sequences of a packing plan."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from forge.data.format import TokenDataset
from forge.data.packing import PackingPlan, open_plan
from forge.data.sources import Source, count_windows
from forge.runtime.errors import UserError


class Windows(Protocol):
    """The `count` samples of a source. fingerprint: identifies the samples' tokens."""

    source: Source
    count: int
    fingerprint: str

    def pieces(self, window: int) -> list[tuple[int, int]]:
        """Return (first token, number of tokens) of each piece of the stream in a sample, in order."""

    def read(self, window: int, documents: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Return a sample's tokens, `[seq_len + 1]` or fewer, and each token's document.

        Document numbers are int32, ascending from 0. The second result is None without `documents`.
        """

    def over(self, first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return, for each token range [first, end), the windows that overlap it: two arrays `[n]`, first and end window.

        The end window is exclusive. Return None if the windows are unknown.
        """


class StreamWindows:
    """Samples of equal length. Window k is tokens k S to k S + S inclusive: S inputs and, shifted by one, S labels.

    T tokens give (T - 1) // S windows. Up to S - 1 tokens at the end are in no window. All remaining tokens, except the
    first, are labels exactly once.
    """

    def __init__(self, source: Source, seq_len: int):
        self.source, self._seq_len = source, seq_len
        self.count, self.fingerprint = count_windows(source, seq_len), source.fingerprint

    def pieces(self, window: int) -> list[tuple[int, int]]:
        return [(window * self._seq_len, self._seq_len + 1)]

    def read(self, window: int, documents: bool) -> tuple[np.ndarray, np.ndarray | None]:
        return read_window(self.source, window, self._seq_len, documents)

    def over(self, first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        # The last token of a window is the first token of the next window.
        low = np.minimum(np.maximum(first - 1, 0) // self._seq_len, self.count - 1)
        return low, np.minimum((end - 1) // self._seq_len, self.count - 1) + 1


class PackedWindows:
    """The sequences of a packing plan (forge/data/packing.py): whole documents, or parts of long documents, concatenated."""

    def __init__(self, source: Source, plan: PackingPlan):
        self.source, self._plan = source, plan
        self.count = plan.sequences
        self.fingerprint = f"{source.fingerprint}-{plan.name}-{plan.digest[:16]}"

    def pieces(self, window: int) -> list[tuple[int, int]]:
        return self._plan.pieces(window)

    def read(self, window: int, documents: bool) -> tuple[np.ndarray, np.ndarray | None]:
        pieces = self.pieces(window)
        tokens = np.concatenate([self.source.read(start, count) for start, count in pieces])
        if not documents:
            return tokens, None
        owners = np.repeat(np.arange(len(pieces), dtype=np.int32), [count for _, count in pieces])
        return tokens, owners

    def over(self, first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        return None


def windows_of(source: Source, seq_len: int, packing: str) -> Windows:
    """Return the samples of a source under `data.packing`.

    Raises UserError if the source has no sample, or no packing plan for `seq_len`.
    """
    if packing == "stream":
        return StreamWindows(source, seq_len)
    if not isinstance(source, TokenDataset):
        raise UserError(
            f'data.packing = "{packing}": {source.name} has no packing plan, because only folders written by '
            'scripts/prepare_data.py can have one; set data.packing = "stream"'
        )
    plan = open_plan(source.path, packing, seq_len, source.fingerprint, source.open_file)
    return PackedWindows(source, plan)


def read_window(
    source: Source, window: int, seq_len: int, documents: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a window's tokens `[seq_len + 1]`, fewer at the end of the source.

    With `documents`, also return each token's document, int32; otherwise None.
    """
    start = window * seq_len
    count = min(seq_len + 1, source.tokens - start)
    return source.read(start, count), source.document_ids(start, count) if documents else None
