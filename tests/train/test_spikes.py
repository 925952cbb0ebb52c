"""Spike detection by a window: outliers neither distort it nor hide in it, and a resume restores it exactly."""

import math
import random

import pytest

from forge.train.state import Limits, SpikeWindow


def filled(values, size: int = 32, threshold: float = 10.0) -> SpikeWindow:
    window = SpikeWindow(size, threshold)
    for step, value in enumerate(values, 1):
        window.add(step, value, 10 * value)
    return window


def noisy(count: int) -> list[float]:
    draw = random.Random(0)
    return [3.0 + draw.gauss(0, 0.05) for _ in range(count)]


def test_there_are_no_limits_before_the_window_is_half_full() -> None:
    assert filled(noisy(15)).limits(17) == Limits()
    limits = filled(noisy(16)).limits(18)
    assert 3.0 < limits.loss < 4.0 and limits.grad_norm == pytest.approx(10 * limits.loss)


def test_a_few_spikes_do_not_change_the_robust_deviation() -> None:
    quiet = filled(noisy(32)).limits(34)
    assert quiet.loss == pytest.approx(3.0 + 10 * 0.05, rel=0.1)
    values = noisy(32)
    for place in (3, 9, 17, 25, 30):
        values[place] = 1e6
    assert filled(values).limits(34).loss == pytest.approx(quiet.loss, rel=0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_never_enter(bad: float) -> None:
    window = filled(noisy(32))
    before = window.limits(40)
    for step in range(33, 38):
        window.add(step, bad, 1.0)
        window.add(step, 1.0, bad)
    assert window.limits(40) == before and not before.exceeded(math.nan, math.nan)


def test_a_persistent_level_becomes_normal() -> None:
    window = filled([*noisy(32), *[value + 5 for value in noisy(17)]])
    assert window.limits(51).loss > 8.0


def test_tiny_deviations_are_no_spikes() -> None:
    assert filled([3.0] * 32).limits(34).loss == pytest.approx(3.0 * 1.01)


def test_a_steps_limits_do_not_depend_on_when_the_previous_step_was_read() -> None:
    late, soon = filled(noisy(40)), filled(noisy(41))
    assert late.limits(42) == soon.limits(42) != soon.limits(43)


def test_a_loaded_window_continues_exactly() -> None:
    values = noisy(100)
    whole, resumed = filled(values[:60]), SpikeWindow(32, 10.0)
    resumed.load(whole.state())
    for step in range(61, 101):
        assert whole.limits(step) == resumed.limits(step)
        for window in (whole, resumed):
            window.add(step, values[step - 1], values[step - 1])
