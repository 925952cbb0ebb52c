"""`Batch`: the token sequences passed from the loader to the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of tokens: one step's batch of a data rank, a microbatch, or a context-parallel rank's part of a microbatch.

    tokens, labels: int64 `[batch, seq]`. A label is the next token, or IGNORE (-100).
    positions: int64 `[batch, seq]`; None: 0, 1, ...
    documents: int32 `[batch, seq]`, the document of each token; None if all tokens of a row may attend to each other. A
    context-parallel rank keeps the documents of the whole sequence.
    sources: int64 `[batch]`, the source of each row, or None.
    ahead: int64 `[batch, seq, depth, 2]`, (token, label) of each multi-token prediction module, or None.
    first_sample: number of row 0 in the global sample order.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    sources: Tensor | None = None
    ahead: Tensor | None = None
    first_sample: int = 0

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        """Return the batch's tensors as the positional arguments of `Transformer.forward`."""
        plain = self.tokens, self.labels, self.positions, self.documents
        return plain if self.ahead is None else (*plain, self.ahead)

    def microbatches(self, size: int) -> Iterator[Batch]:
        """Yield views of `size` rows each, in order.

        The last view is smaller if `size` does not divide the number of rows.
        """
        for start in range(0, len(self.tokens), size):
            yield self._map(itemgetter(slice(start, start + size)), self.first_sample + start)

    def to(self, device: torch.device) -> Batch:
        """Return a copy on `device`; asynchronous from pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True), self.first_sample)

    def pin_memory(self) -> Batch:
        return self._map(lambda tensor: tensor.pin_memory(), self.first_sample)

    def _map(self, function: Callable[[Tensor], Tensor], first_sample: int) -> Batch:
        made = {name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, first_sample=first_sample, **made)
