"""Covering arrays keep every pair of values."""

import itertools

from tests.support.covering import covering, pairs


def test_few_cases_cover_every_pair_of_a_grid() -> None:
    grid = list(itertools.product("abcde", range(4), (False, True)))
    chosen = covering(grid, lambda case: pairs(*case), [("c", 3, True)])
    everything = set().union(*(pairs(*case) for case in grid))
    assert set().union(*(pairs(*case) for case in chosen)) == everything
    assert ("c", 3, True) in chosen and 20 <= len(chosen) <= 22 < len(grid) == 40
    assert chosen == [case for case in grid if case in chosen], "in the order of the grid"


def test_equal_values_at_two_places_are_two_values() -> None:
    assert len(pairs(2, 2, 2)) == 3
