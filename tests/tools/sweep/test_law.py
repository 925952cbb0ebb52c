"""Fits recover planted laws, and intervals show the remaining uncertainty."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forge.runtime.errors import UserError
from forge.tools.sweep.law import Law, fit_law
from forge.tools.sweep.optima import fit_power_law, least_at

# Chinchilla's law, and another.
LAWS = [Law(1.69, 406.4, 0.34, 410.7, 0.28), Law(0.6, 30.0, 0.22, 900.0, 0.41)]
SIZES = [1e6, 4e6, 1.6e7, 6.4e7]


def runs(law: Law, noise: float = 0.0, seed: int = 1) -> tuple[list[float], list[float], list[float]]:
    drawn = np.random.default_rng(seed)
    points = [(n, n * ratio) for n in SIZES for ratio in (2.0, 8.0, 32.0, 128.0)]
    losses = [law.loss(n, d) * math.exp(noise * drawn.standard_normal()) for n, d in points]
    return [n for n, _ in points], [d for _, d in points], losses


@pytest.mark.long
def test_runs_without_information_about_a_size_are_detected() -> None:
    for law, wanted in (
        (LAWS[0], []),
        (Law(1.7, 0.0, 0.35, 300.0, 0.3), ["N"]),
        (Law(1.7, 300.0, 0.3, 0.0, 0.35), ["D"]),
    ):
        n, d, losses = runs(law, noise=0.005)
        assert fit_law(n, d, losses, resamples=2).without_effect(n, d) == wanted


@pytest.mark.long
@pytest.mark.parametrize("law", LAWS)
def test_a_planted_law_is_recovered(law: Law) -> None:
    fit = fit_law(*runs(law), resamples=20)
    for name, wanted in vars(law).items():
        assert getattr(fit.law, name) == pytest.approx(wanted, rel=0.02), name
    assert max(map(abs, fit.errors)) < 1e-4
    operations = 1e21
    assert fit.law.optimum(operations)[0] == pytest.approx(law.optimum(operations)[0], rel=0.05)


def test_with_noise_and_an_outlier_the_prediction_holds_and_lies_in_its_interval() -> None:
    n, d, losses = runs(LAWS[0], noise=0.002)
    losses[5] *= 1.2  # an outlier
    fit = fit_law(n, d, losses)
    wanted = LAWS[0].loss(1e9, 2e10)
    low, high = fit.interval(lambda law: law.loss(1e9, 2e10))
    assert fit.law.loss(1e9, 2e10) == pytest.approx(wanted, rel=0.03)
    assert low < wanted < high
    assert abs(fit.errors[5]) > 0.1 > 0.02 > max(abs(e) for e in fit.errors[:5] + fit.errors[6:])


def test_nine_of_ten_runs_are_in_the_interval_of_a_run() -> None:
    inside = []
    for seed in range(10, 14):
        fit = fit_law(*runs(LAWS[0], noise=0.01, seed=seed), resamples=20)
        of_law, of_run = fit.interval(lambda law: law.loss(1e9, 2e10)), fit.interval_of_run(1e9, 2e10)
        assert of_run[0] < of_law[0] < of_law[1] < of_run[1]
        for *at, loss in zip(*runs(LAWS[0], noise=0.01, seed=seed + 100), strict=True):
            low, high = fit.interval_of_run(*at)
            inside.append(low < loss < high)
    assert 0.8 < sum(inside) / len(inside) < 1.0


def test_the_optimum_is_the_least_loss_of_its_budget() -> None:
    n, d = LAWS[0].optimum(1e20)
    assert 6 * n * d == pytest.approx(1e20)
    assert all(LAWS[0].loss(n, d) < LAWS[0].loss(n * f, d / f) for f in (0.9, 1.1))


def test_two_sizes_predict_a_third_by_the_prior_of_the_exponent() -> None:
    law = Law(1.7, 80.0, 0.35, 300.0, 0.35)
    points = [(n, n * ratio) for n in SIZES[:2] for ratio in (2.0, 8.0, 32.0, 128.0)]
    fit = fit_law(*zip(*((n, d, law.loss(n, d)) for n, d in points), strict=True))
    assert fit.law.loss(SIZES[2], 20 * SIZES[2]) == pytest.approx(law.loss(SIZES[2], 20 * SIZES[2]), rel=0.01)


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        ([(1e6, 1e7)] * 6, "two different numbers of parameters"),
        ([(1e6 * k, 1e7) for k in range(1, 7)], "two different numbers of tokens"),
        ([(1e6, 1e7), (2e6, 3e7), (4e6, 5e7)], "at least five runs"),
    ],
)
def test_too_few_runs_are_refused(points: list[tuple[float, float]], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        fit_law([n for n, _ in points], [d for _, d in points], [3.0] * len(points))


def test_the_least_loss_over_learning_rates_lies_between_those_tried() -> None:
    rates = [1e-3 * 2**k for k in range(5)]
    losses = [3 + 0.1 * math.log(rate / 5e-3) ** 2 for rate in rates]
    assert least_at(rates, losses) == pytest.approx(5e-3)
    assert least_at(rates, [3 - rate for rate in rates]) is None


def test_a_planted_power_law_is_recovered_and_sizes_that_move_together_count_once() -> None:
    rows = [
        {"parameters": n, "tokens": d, "best": 3.0 * n**-0.25 * d**0.1} for n in SIZES for d in (1e8, 1e9)
    ]
    law = fit_power_law(rows, "best", ("parameters", "tokens"))
    assert law is not None and law.spread == pytest.approx(1.0)
    assert law.powers == pytest.approx({"parameters": -0.25, "tokens": 0.1})
    assert law.at(parameters=1e9, tokens=1e10) == pytest.approx(3.0 * 1e9**-0.25 * 1e10**0.1)
    together = [{"parameters": n, "tokens": 20 * n, "best": n**0.5} for n in SIZES]
    law = fit_power_law(together, "best", ("parameters", "tokens"))
    assert law is not None and law.powers == pytest.approx({"parameters": 0.5})
