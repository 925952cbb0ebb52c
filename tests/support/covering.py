"""Thin a grid of tests to a covering array. The kept cases together contain each pair of values of the full grid."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any


def pairs(*values: Hashable) -> set[tuple[Hashable, Hashable]]:
    """Return every pair of `values` with their places. Equal values at different places give different pairs."""
    return set(itertools.combinations(enumerate(values), 2))


def covering(
    cases: Sequence[Any], goals: Callable[[Any], Iterable[Hashable]], taken: Iterable[Any] = ()
) -> list[Any]:
    """Return a subset of `cases` that covers all their goals, in their order and including `taken`.

    Greedy set cover: repeatedly take the case with the most uncovered goals, and of equal cases the first. The result is
    deterministic, and close to the smallest subset.
    """
    reached = {number: set(goals(case)) for number, case in enumerate(cases)}
    kept = {cases.index(case) for case in taken}
    left = set().union(*reached.values()) - set().union(*(reached[number] for number in kept))
    # A case's number of uncovered goals only shrinks, so an old number is an upper bound.
    queue = [(-len(goals), number) for number, goals in reached.items()]
    heapq.heapify(queue)
    while left:
        before, best = heapq.heappop(queue)
        now = -len(reached[best] & left)
        if now != before:
            heapq.heappush(queue, (now, best))
            continue
        kept.add(best)
        left -= reached[best]
    return [cases[number] for number in sorted(kept)]
