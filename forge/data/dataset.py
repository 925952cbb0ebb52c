"""`PackedDataset`: the global sequence of training samples, each a window of a token stream."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import lru_cache

import numpy as np

from forge.data.mixture import Mixture
from forge.data.order import Order, numbered
from forge.data.permutation import Permutation
from forge.data.sources import Source, is_remote
from forge.data.windows import windows_of
from forge.runtime.errors import UserError


class PackedDataset:
    """`dataset[i]` is global sample i, for any i >= 0 not skipped by `dataset.order` (forge/data/order.py).

    packing: the division of a source into samples (forge/data/windows.py).
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
