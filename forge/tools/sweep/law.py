"""Fit the scaling law loss = E + A / N^a + B / D^b to runs of N parameters on D tokens.

The objective is that of Hoffmann et al. 2022 (arXiv:2203.15556, approach 3): the Huber loss of log(predicted) - log(seen),
over (log E, log A, a, log B, b). It is minimised by damped Gauss-Newton steps from many starts at once. Intervals are
quantiles over resampled runs.

A weak prior keeps the exponents near 0.35. Runs with sufficiently different N and D outweigh the prior. With only two model
sizes, the prior determines a.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from forge.runtime.errors import UserError

HUBER = 1e-3
PRIOR, PRIOR_WIDTH, PRIOR_WEIGHT = 0.35, 0.15, 1e-8
ITERATIONS = 300
# FLOPs of training per parameter and token.
OPERATIONS = 6.0


@dataclass(frozen=True)
class Law:
    """The coefficients of loss(N, D) = E + A / N^a + B / D^b."""

    E: float
    A: float
    a: float
    B: float
    b: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.E + self.A / parameters**self.a + self.B / tokens**self.b

    def optimum(self, operations: float) -> tuple[float, float]:
        """Return the N and D with the least loss for 6 N D = `operations` FLOPs (equation 4 of the paper)."""
        ratio = (self.a * self.A / (self.b * self.B)) ** (1 / (self.a + self.b))
        parameters = ratio * (operations / OPERATIONS) ** (self.b / (self.a + self.b))
        return parameters, operations / OPERATIONS / parameters


@dataclass(frozen=True)
class Fit:
    """A fitted law. law: fitted to all runs. resampled: laws fitted to resampled runs.

    errors: predicted / seen - 1 per run.
    """

    law: Law
    resampled: list[Law]
    errors: list[float]

    def interval(self, of: Callable[[Law], float], share: float = 0.9) -> tuple[float, float]:
        """Compute `of(law)` for each resampled law.

        Return the central interval (low, high) that contains the fraction `share` of these values.
        """
        return _central([of(law) for law in self.resampled], share)

    def interval_of_run(self, parameters: float, tokens: float, share: float = 0.9) -> tuple[float, float]:
        """Return the central interval (low, high) that contains the loss of a new run with probability `share`.

        The interval is over all pairs of a resampled law and an error of a fitted run. The errors are multiplied by
        sqrt(runs / (runs - 5)), because the law's five coefficients are fitted to the runs.
        """
        runs = len(self.errors)
        scale = math.sqrt(runs / max(runs - 5, 1))
        losses = [law.loss(parameters, tokens) for law in self.resampled]
        return _central([loss / (1 + scale * error) for loss in losses for error in self.errors], share)

    def without_effect(self, parameters: Sequence[float], tokens: Sequence[float]) -> list[str]:
        """Return the variables ("N", "D") whose effect on the loss, over the range of the runs, is below the law's error.

        With such a variable the law has no meaningful optimum.
        """
        # The 0.9 quantile of the errors, because the largest may belong to failed runs.
        least = max(float(np.quantile(np.abs(self.errors), 0.9)), 1e-4)
        small, large = min(parameters), max(parameters)
        few, many = min(tokens), max(tokens)
        of_size = self.law.loss(small, many) / self.law.loss(large, many) - 1
        of_tokens = self.law.loss(large, few) / self.law.loss(large, many) - 1
        return [name for name, effect in (("N", of_size), ("D", of_tokens)) if effect < least]


def fit_law(
    parameters: Sequence[float],
    tokens: Sequence[float],
    losses: Sequence[float],
    *,
    resamples: int = 100,
    seed: int = 0,
) -> Fit:
    """Fit the law to runs, with one value per run in `parameters`, `tokens` and `losses`.

    resamples: number of bootstrap samples. Raises UserError for fewer than five runs, or if all runs have the same size
    or the same number of tokens.
    """
    n, d, loss = (np.asarray(values, dtype=np.float64) for values in (parameters, tokens, losses))
    for what, values in (("numbers of parameters", n), ("numbers of tokens", d)):
        if len(set(values.tolist())) < 2:
            raise UserError(
                f"a law needs runs with at least two different {what}, but all have {values[0]:g}"
            )
    if len(loss) < 5:
        raise UserError(
            f"a law has five coefficients and needs at least five runs, but there are {len(loss)}"
        )
    x = np.stack([np.log(n), np.log(d)], axis=-1)[None]  # [1, runs, 2]
    y = np.log(loss)[None]
    starts = np.array(_starts(x[0], loss))
    ones = np.ones_like(y)
    found, values = _minimise(starts, x, y, ones)
    best = found[np.argmin(values)]
    drawn = np.random.default_rng(seed)
    weights = drawn.multinomial(len(loss), np.full(len(loss), 1 / len(loss)), size=resamples).astype(
        np.float64
    )
    others, _ = _minimise(np.repeat(best[None], resamples, 0), x, y, weights)
    law = _law(best)
    errors = [law.loss(*pair) / seen - 1 for pair, seen in zip(zip(n, d, strict=True), loss, strict=True)]
    return Fit(law, [_law(point) for point in others], [float(error) for error in errors])


def _central(values: list[float], share: float) -> tuple[float, float]:
    """Return the central interval (low, high) that contains the fraction `share` of `values`."""
    low, high = np.quantile(values, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def _starts(x: np.ndarray, loss: np.ndarray) -> list[list[float]]:
    """Return starting points (log E, log A, a, log B, b) on a grid of a, b and E / loss.

    At the mean log N and log D, each starting point predicts the smallest loss of the runs.
    """
    least, middle = float(loss.min()), x.mean(0)
    starts = []
    for share, a, b in product((0.1, 0.4, 0.7, 0.95), (0.15, 0.35, 0.6), (0.15, 0.35, 0.6)):
        rest = np.log(least * (1 - share) / 2)
        starts.append([np.log(least * share), rest + a * middle[0], a, rest + b * middle[1], b])
    return starts


def _minimise(
    points: np.ndarray, x: np.ndarray, y: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Run damped Gauss-Newton steps from `points` `[n, 5]`. Return the end points, and the objective there, `[n]`.

    x: log N and log D, `[1, runs, 2]`. y: log loss, `[1, runs]`. weights: of the runs, `[n, runs]` or `[1, runs]`.
    """
    points, damping = points.copy(), np.full(len(points), 1e-3)
    values = _value(points, x, y, weights)
    for _ in range(ITERATIONS):
        residual, jacobian = _residual(points, x, y)
        # The Huber loss as weighted least squares, with weights falling off beyond HUBER.
        scale = weights * np.minimum(1.0, HUBER / np.maximum(np.abs(residual), 1e-300))
        gradient = np.einsum("nr,nr,nrp->np", scale, residual, jacobian)
        curvature = np.einsum("nr,nrp,nrq->npq", scale, jacobian, jacobian)
        for place in (2, 4):
            gradient[:, place] += PRIOR_WEIGHT * (points[:, place] - PRIOR) / PRIOR_WIDTH**2
            curvature[:, place, place] += PRIOR_WEIGHT / PRIOR_WIDTH**2
        diagonal = np.einsum("npp->np", curvature)
        damped = curvature + (damping[:, None] * (diagonal + 1e-12))[:, :, None] * np.eye(5)
        step = np.linalg.solve(damped, gradient[:, :, None])[:, :, 0]
        tried = points - np.clip(step, -1.0, 1.0)
        tried[:, [2, 4]] = np.clip(tried[:, [2, 4]], 1e-3, 3.0)
        new = _value(tried, x, y, weights)
        better = new < values
        points = np.where(better[:, None], tried, points)
        values = np.where(better, new, values)
        damping = np.clip(np.where(better, damping / 3, damping * 2), 1e-12, 1e12)
    return points, values


def _residual(points: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return log(predicted) - log(seen), `[n, runs]`, and its derivatives by the five coefficients, `[n, runs, 5]`."""
    e, big_a, a, big_b, b = (points[:, place, None] for place in range(5))
    parts = np.stack([e + 0 * x[..., 0], big_a - a * x[..., 0], big_b - b * x[..., 1]], axis=-1)
    top = parts.max(-1, keepdims=True)
    shares = np.exp(parts - top)
    total = shares.sum(-1, keepdims=True)
    shares = shares / total
    derivatives = [
        shares[..., 0],
        shares[..., 1],
        -x[..., 0] * shares[..., 1],
        shares[..., 2],
        -x[..., 1] * shares[..., 2],
    ]
    return (top + np.log(total))[..., 0] - y, np.stack(derivatives, axis=-1)


def _value(points: np.ndarray, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    far = np.abs(_residual(points, x, y)[0])
    huber = np.where(far <= HUBER, 0.5 * far**2, HUBER * (far - 0.5 * HUBER))
    prior = ((points[:, [2, 4]] - PRIOR) ** 2).sum(-1) * 0.5 * PRIOR_WEIGHT / PRIOR_WIDTH**2
    return (weights * huber).sum(-1) + prior


def _law(point: np.ndarray) -> Law:
    e, big_a, a, big_b, b = (float(value) for value in point)
    return Law(float(np.exp(e)), float(np.exp(big_a)), a, float(np.exp(big_b)), b)
