"""What is usual for loss and gradient norm, and what is a spike, by a window that outliers cannot bend."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

# Of a normal distribution, the standard deviation in median absolute deviations.
DEVIATIONS = 1.4826
# Losses that hardly differ would make spikes of nothing: a deviation is at least this part of the median.
FLOOR = 1e-3


@dataclass(frozen=True)
class Limits:
    """Above these a step is a spike."""

    loss: float = math.inf
    grad_norm: float = math.inf

    def exceeded(self, loss: float, grad_norm: float) -> bool:
        return loss > self.loss or grad_norm > self.grad_norm


@dataclass
class SpikeWindow:
    """Loss and gradient norm of the latest steps; a part of the training state.

    Median and median absolute deviation, so that a spike in the window hides no other, while a level that stays becomes
    the usual one; numbers that are not finite never enter. `limits` of a step are made of steps at least two before it:
    what every run knows when it launches a step, also one that has just been resumed.
    """

    size: int = 128
    threshold: float = 10.0
    entries: list[tuple[int, float, float]] = field(default_factory=list)

    def add(self, step: int, loss: float, grad_norm: float) -> None:
        """Add a step, unless its numbers are not finite."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.entries.append((step, loss, grad_norm))
            # One more than counts, because the latest may be too late to count.
            del self.entries[: -self.size - 1]

    def limits(self, step: int) -> Limits:
        """What is a spike in `step`; no limits until half of the window is there."""
        known = [entry for entry in self.entries if entry[0] <= step - 2][-self.size :]
        if 2 * len(known) < self.size:
            return Limits()
        return Limits(
            _limit([loss for _, loss, _ in known], self.threshold),
            _limit([norm for _, _, norm in known], self.threshold),
        )

    def state(self) -> list[tuple[int, float, float]]:
        """As JSON for a checkpoint."""
        return list(self.entries)

    def load(self, state: Iterable[tuple[int, float, float]]) -> None:
        """Take over what `state` returned, of a window of any size."""
        self.entries = [(int(step), float(loss), float(norm)) for step, loss, norm in state][-self.size - 1 :]


def _limit(values: list[float], threshold: float) -> float:
    middle = median(values)
    deviation = DEVIATIONS * median([abs(value - middle) for value in values])
    return middle + threshold * max(deviation, FLOOR * abs(middle))
