"""Two temporary buckets at most, which all buckets of an engine take turns to use."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

SLOTS = 2


class Pool:
    """Memory for `SLOTS` buckets, the largest of those with `sizes` bytes, there from the first use until `clear`."""

    def __init__(self, sizes: Collection[int], device: torch.device):
        self._slots, self._nbytes, self._device = min(SLOTS, len(sizes)), max(sizes, default=0), device
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}
        self.peak = 0
        """The most slots that were ever there at once."""

    @property
    def full(self) -> bool:
        return len(self._taken) == self._slots

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised `[numel]`, to be given back."""
        assert not self.full and numel * dtype.itemsize <= self._nbytes
        slot = (
            self._free.pop()
            if self._free
            else torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        )
        self._taken[slot.data_ptr()] = slot
        self.peak = max(self.peak, len(self._taken) + len(self._free))
        return slot[: numel * dtype.itemsize].view(dtype)

    def give(self, taken: Tensor) -> None:
        """Lend the memory of `taken` to others."""
        self._free.append(self._taken.pop(taken.data_ptr()))

    def clear(self) -> None:
        """Free the memory of what has been given back."""
        self._free.clear()

    @property
    def nbytes(self) -> int:
        """Of all slots together, while there are any."""
        return self._slots * self._nbytes
