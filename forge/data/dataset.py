"""The global sequence of training samples (`PackedDataset`), and the division of a token stream into samples (`Windows`).

Samples are equal windows of the stream, or the sequences of a packing plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import Protocol

import numpy as np

from forge.data.format import TokenDataset
from forge.data.order import Mixture, Order, numbered
from forge.data.packing import PackingPlan, open_plan
from forge.data.permutation import Permutation
from forge.data.sources import Source, count_windows, is_remote
from forge.runtime.errors import UserError


class PackedDataset:
    """`dataset[i]` is global sample i, for any i >= 0 not skipped by `dataset.order` (forge/data/order.py).

    packing: the division of a source into samples (see `windows_of`).
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        seq_len: int,
        seed: int,
        block: int = 1024,
        document_mask: bool = False,
        packing: str = "stream",
        max_epochs: Sequence[float] = (),
    ):
        cut = [windows_of(source, seq_len, packing) for source in sources]
        self.samples = dict(zip(numbered(windows.fingerprint for windows in cut), cut, strict=True))
        """Source name in `order` -> samples. The dictionaries below have the same keys."""
        self.labels = {name: windows.source.name for name, windows in self.samples.items()}
        """Names for messages: the path, or the source's name in the config."""
        self.sources = {name: windows.source for name, windows in self.samples.items()}
        self.is_remote = any(is_remote(source) for source in sources)
        """Whether reading a sample may wait for a remote store."""
        self.weights = dict(zip(self.sources, weights, strict=True))
        self.seq_len = seq_len
        self.document_mask = document_mask
        self.windows = {name: windows.count for name, windows in self.samples.items()}
        self.caps = {
            name: max(1, int(most * self.windows[name]))
            for name, most in zip(self.samples, max_epochs, strict=False)
            if most
        }
        """Number of samples after which a source is left out, for sources with max_epochs."""
        self.most_epochs: dict[str, float] = {}
        """Number of epochs that a run must not exceed, under data.on_max_epochs = "refuse"."""
        self._block = block
        self.block = Mixture(weights, seed, block).block
        beginning = Order.beginning(seed, list(self.sources), weights, self.block)
        self.order = self.continuing(beginning, 0)
        """The order of a run that begins at sample 0."""
        # One or two epochs of each source are in use at the same time.
        self._permutation = lru_cache(maxsize=2 * len(self.sources) + 2)(Permutation)

    def following(
        self, order: Order, document_mask: bool | None = None, weights: Sequence[float] | None = None
    ) -> PackedDataset:
        """Return a dataset of the same sources in the order `order`. document_mask, weights: None: as in this dataset."""
        dataset = copy(self)
        dataset.order = order
        if weights is not None:
            dataset.weights = dict(zip(self.sources, weights, strict=True))
        dataset.document_mask = self.document_mask if document_mask is None else document_mask
        return dataset

    def continuing(self, order: Order, position: int, weights: Sequence[float] | None = None) -> Order:
        """Return `order` up to global sample `position`, continued with this dataset's sources.

        weights: one per source, used from `position`; None: the configured weights.
        """
        if weights is None:
            return order.continued(self.weights, self.block, position, self.caps)
        block = Mixture(weights, order.seed, self._block).block
        return order.continued(dict(zip(self.sources, weights, strict=True)), block, position, self.caps)

    def locate(self, global_sample: int) -> tuple[str, int, int]:
        """Return (source name, epoch, index of the sample within the source).

        Raises UserError if the source is no longer configured.
        """
        number, sample = self.order.locate(global_sample)
        name = self.order.sources[number]
        if name not in self.sources:
            raise UserError(
                f"sample {global_sample} comes from a source that is no longer in data.sources (fingerprint {name}); "
                "add that source with a weight above 0, or start a new run under another run.name"
            )
        epoch, index = divmod(sample, self.windows[name])
        return name, epoch, self._permutation(self.windows[name], self.order.key(number, epoch))(index)

    def __getitem__(self, global_sample: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return two arrays: the tokens `[seq_len + 1]`, and each token's document, int32 `[seq_len + 1]`, numbered from 0.

        With a packing plan, a sample may have fewer tokens. Without `document_mask`, the second result is None.
        """
        name, _, window = self.locate(global_sample)
        return self.samples[name].read(window, self.document_mask)


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
