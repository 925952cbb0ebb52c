"""Stragglers from the ranks' own timings."""

import pytest

from forge.resilience.stragglers import LEAST_S, slow_ranks

# data, forward, optimizer, whole step, kind of the timed layer
USUAL = [0.01, 0.1, 0.05, 1.0, 3]


def but(**values: float) -> list[float]:
    places = {"data": 0, "forward": 1, "optimizer": 2}
    row = list(USUAL)
    for name, value in values.items():
        row[places[name]] = value
    return row


def test_h2_a_rank_is_named_with_each_phase_delaying_the_others() -> None:
    table = [USUAL, but(forward=0.2), USUAL, but(data=0.5, optimizer=0.4)]
    assert slow_ranks(table, 1.3) == [
        (3, "data", 0.5, 0.01),
        (1, "forward", 0.2, 0.1),
        (3, "optimizer", 0.4, 0.05),
    ]


@pytest.mark.parametrize("world", [2, 3, 8])
def test_only_the_slow_rank_is_named_at_any_world_size(world: int) -> None:
    table = [USUAL] * (world - 1) + [but(forward=0.2)]
    assert [rank for rank, *_ in slow_ranks(table, 1.3)] == [world - 1]


def test_the_forwards_of_different_kinds_of_layers_are_not_compared() -> None:
    """E.g. pipeline stages whose last blocks are a sliding window and full attention."""
    full = [*but(forward=0.4)[:-1], 7]
    slow = [*but(forward=0.9)[:-1], 7]
    assert slow_ranks([USUAL, USUAL, full, full], 1.3) == []
    assert slow_ranks([USUAL, USUAL, full, slow, full], 1.3) == [(3, "forward", 0.9, 0.4)]


def test_a_hidden_delay_is_not_reported() -> None:
    assert slow_ranks([USUAL, but(optimizer=0.25, data=0.2, forward=0.125)], 1.3) == []


def test_equally_slow_ranks_are_no_stragglers_and_zero_times_are_safe() -> None:
    assert slow_ranks([but(forward=9.0)] * 4, 1.3) == []
    assert slow_ranks([[0.0] * 4] * 2, 1.3) == []


@pytest.mark.parametrize("phase", ["data", "forward", "optimizer"])
def test_a_delay_of_milliseconds_is_never_reported(phase: str) -> None:
    """In a step of 9 ms, one rank takes 5 ms for a phase, the other 1 ms. With all times tenfold, the rank is reported."""
    quick = [0.001, 0.001, 0.001, 0.009]
    slow = list(quick)
    slow[["data", "forward", "optimizer"].index(phase)] = 0.005
    assert slow_ranks([quick, slow], 1.3) == []
    longer = [[10 * seconds for seconds in row] for row in (quick, slow)]
    assert LEAST_S < 0.04 and [found[:2] for found in slow_ranks(longer, 1.3)] == [(1, phase)]


def test_ranks_without_a_timed_forward_make_no_other_rank_slow() -> None:
    """E.g. pipeline stages without a block."""
    assert slow_ranks([but(forward=0.0), but(forward=0.0), USUAL], 1.3) == []
    assert slow_ranks([but(forward=0.0)] * 2, 1.3) == []
    assert slow_ranks([but(forward=0.0), USUAL, but(forward=0.2)], 1.3) == [(2, "forward", 0.2, 0.1)]
