"""When a run has to stop so that it has saved in time."""

import time

import pytest

from forge.resilience.time_limit import TimeLimit


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def stops_at(limit: TimeLimit, clock: list[float], save_s: float) -> float:
    """The first second at which the run is to stop."""
    clock[0] = 100.0
    while not limit.near(save_s):
        clock[0] += 1.0
    return clock[0]


def after(clock: list[float], *phases: tuple[str, float]) -> TimeLimit:
    clock[0] = 100.0
    limit = TimeLimit(1000.0, began=clock[0])
    for phase, seconds in phases:
        limit.enter(phase, 0)
        clock[0] += seconds
    limit.enter("end", 0)
    return limit


def test_without_a_limit_it_is_never_time(clock) -> None:
    clock[0] = 1e9
    assert not TimeLimit(0.0, began=0.0).near(1e6)


def test_two_saves_some_steps_and_an_evaluation_are_left_for(clock) -> None:
    assert stops_at(after(clock, ("step", 0.0)), clock, save_s=100.0) == 100 + 1000 - 2 * 100
    assert stops_at(after(clock, ("data", 1.0), ("step", 9.0)), clock, save_s=100.0) == 100 + 800 - 3 * 10
    assert stops_at(after(clock, ("step", 0.0), ("evaluation", 50.0)), clock, save_s=100.0) == 100 + 750


def test_before_the_first_save_a_share_of_the_limit_is_left_for_it(clock) -> None:
    assert stops_at(after(clock, ("step", 0.0)), clock, save_s=0.0) == 100 + 950


def test_old_steps_and_the_first_one_are_forgotten(clock) -> None:
    phases = [("first step", 500.0), ("step", 300.0), *[("step", 2.0)] * 10]
    assert stops_at(after(clock, *phases), clock, save_s=100.0) == 100 + 800 - 3 * 2
