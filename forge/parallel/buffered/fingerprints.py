"""Have all ranks computed with the same weights? A sum of the bits of each, taken in every step before it is gathered anew.

Gathering heals: a bit that flips in one rank's copy spoils the gradients of one step, and is gone by the time that
copies are compared. So each step adds to a fingerprint what it has computed with. One pass over the weights per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from forge.parallel.buffered.buffer import Buffer
from forge.parallel.buffered.layout import PART_ALIGNMENT, round_up

# Odd, so that multiplying by it modulo 2^64 loses nothing (the multiplier of Knuth's MMIX generator).
_MULTIPLIER = 6364136223846793005


class Fingerprints:
    """Of those parameters in `buffers` with which several ranks compute alike."""

    def __init__(self, buffers: Sequence[Buffer]):
        self._of: list[tuple[str, Tensor, dist.ProcessGroup]] = []
        for buffer in buffers:
            if buffer.plan.axes.alike.size() > 1:
                for slot in buffer.plan.layout.slots.values():
                    # With the zeros behind it, which fill its last word of 64 bits.
                    values = buffer.compute[slot.start :][: round_up(slot.stop - slot.start, PART_ALIGNMENT)]
                    self._of.append((slot.name, values.view(torch.int64), buffer.plan.axes.alike))
        self._sums: Tensor | int = 0

    def add(self) -> None:
        """What the weights are now. Does not wait for the device."""
        if self._of:
            self._sums = self._sums * _MULTIPLIER + torch.stack([words.sum() for _, words, _ in self._of])

    def take(self) -> Iterator[tuple[str, Tensor, dist.ProcessGroup]]:
        """Name, what was added since this was last asked, and the ranks that should have added the same."""
        sums, self._sums = self._sums, 0
        for number, (name, _, alike) in enumerate(self._of):
            assert isinstance(sums, Tensor), "nothing was added"
            yield f"weights.{name}", sums[number], alike
