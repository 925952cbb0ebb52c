"""Detect spikes of loss and gradient norm by medians over a window, because outliers hardly change a median."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

# The standard deviation of a normal distribution in units of its median absolute deviation.
DEVIATIONS = 1.4826
# Lower bound of the deviation, relative to the median. Otherwise, with nearly equal losses, every loss would be a
# spike.
FLOOR = 1e-3


@dataclass(frozen=True)
class Limits:
    """The limits of loss and gradient norm. A step above either limit is a spike."""

    loss: float = math.inf
    grad_norm: float = math.inf

    def exceeded(self, loss: float, grad_norm: float) -> bool:
        return loss > self.loss or grad_norm > self.grad_norm


@dataclass
class SpikeWindow:
    """Loss and gradient norm of the latest steps; part of the training state.

    Limits derive from the median and the median absolute deviation. A spike in the window therefore does not hide another
    spike. Skipped steps are not in the window, so it cannot follow a lasting new level: a phase with another mixture or
    length clears it. Non-finite numbers are left out. The limits of step n use only steps up to n - 2. When step n is
    launched, every rank has the results of these steps, even just after a resume.
    """

    size: int = 128
    threshold: float = 10.0
    entries: list[tuple[int, float, float]] = field(default_factory=list)

    def add(self, step: int, loss: float, grad_norm: float) -> None:
        """Add a step. A step with a non-finite number is ignored."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.entries.append((step, loss, grad_norm))
            # Keep one more than `size`, because `limits` may leave the latest step out.
            del self.entries[: -self.size - 1]

    def clear(self) -> None:
        """Forget all steps, because later steps may have another loss for a good reason."""
        self.entries = []

    def limits(self, step: int) -> Limits:
        """Return the limits of `step`; infinite until half of the window is filled."""
        known = [entry for entry in self.entries if entry[0] <= step - 2][-self.size :]
        if 2 * len(known) < self.size:
            return Limits()
        return Limits(
            _limit([loss for _, loss, _ in known], self.threshold),
            _limit([norm for _, _, norm in known], self.threshold),
        )

    def state(self) -> list[tuple[int, float, float]]:
        """Return the window as JSON for a checkpoint."""
        return list(self.entries)

    def load(self, state: Iterable[tuple[int, float, float]]) -> None:
        """Restore the result of the method `state`. The saved window may have had another size."""
        self.entries = [(int(step), float(loss), float(norm)) for step, loss, norm in state][-self.size - 1 :]


def _limit(values: list[float], threshold: float) -> float:
    middle = median(values)
    deviation = DEVIATIONS * median([abs(value - middle) for value in values])
    return middle + threshold * max(deviation, FLOOR * abs(middle))
