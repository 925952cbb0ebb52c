"""Find the best learning rates and batch sizes. Fit a power law in the model size to each of the two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PowerLaw:
    """value = factor * product of x ** power, over the sizes x in `powers`.

    spread: typical factor between a value and the law, i.e. exp of the standard deviation of log(value / law).
    """

    factor: float
    powers: Mapping[str, float]
    spread: float

    def at(self, **sizes: float) -> float:
        return self.factor * math.prod(sizes[name] ** power for name, power in self.powers.items())


def least_at(values: Sequence[float], losses: Sequence[float]) -> float | None:
    """Fit a parabola of the loss over log(value) to the best value and its two neighbours. Return the value at its minimum.

    Return None if the best value is the smallest or the largest, because the minimum is then outside of the tried values.
    """
    best: dict[float, float] = {}
    for value, loss in zip(values, losses, strict=True):
        best[value] = min(loss, best.get(value, loss))
    xs = sorted(best)
    place = min(range(len(xs)), key=lambda number: best[xs[number]])
    if place in (0, len(xs) - 1):
        return None
    near = xs[place - 1 : place + 2]
    a, b, _ = np.polyfit([math.log(x) for x in near], [best[x] for x in near], 2)
    return math.exp(-b / (2 * a)) if a > 0 else xs[place]


def fit_power_law(rows: Sequence[Mapping[str, float]], value: str, sizes: Sequence[str]) -> PowerLaw | None:
    """Fit the column `value` of `rows` as a power law in the columns `sizes`, without constant columns.

    Return None for too few rows.
    """
    used = [name for name in sizes if len({row[name] for row in rows}) > 1]
    if len(rows) < len(used) + 1 or not used:
        return None
    matrix = np.array([[1.0, *(math.log(row[name]) for name in used)] for row in rows])
    if np.linalg.matrix_rank(matrix) < matrix.shape[1]:
        # Proportional sizes cannot be distinguished. Drop the last size and try again.
        return fit_power_law(rows, value, used[:-1]) if len(used) > 1 else None
    wanted = np.array([math.log(row[value]) for row in rows])
    solution, *_ = np.linalg.lstsq(matrix, wanted, rcond=None)
    rest = wanted - matrix @ solution
    freedom = max(1, len(rows) - matrix.shape[1])
    powers = dict(zip(used, (float(power) for power in solution[1:]), strict=True))
    return PowerLaw(math.exp(solution[0]), powers, math.exp(math.sqrt(float(rest @ rest) / freedom)))
