"""A grid of tests thinned to where each further case would only repeat pairs of values that others have shown together."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any


def pairs(*values: Hashable) -> set[tuple[Hashable, Hashable]]:
    """Every two of `values`, each distinguished by its place."""
    return set(itertools.combinations(enumerate(values), 2))


def covering(
    cases: Sequence[Any], goals: Callable[[Any], Iterable[Hashable]], taken: Iterable[Any] = ()
) -> list[Any]:
    """Some of `cases`, in their order, that together reach every goal which all of them reach; `taken` are among them.

    Greedy: again and again the case that reaches most of what is left, the first of equals. Near the fewest, and
    always the same ones.
    """
    reached = {number: set(goals(case)) for number, case in enumerate(cases)}
    kept = {cases.index(case) for case in taken}
    left = set().union(*reached.values()) - set().union(*(reached[number] for number in kept))
    # What a case reaches of what is left only shrinks, so a number from before is at least as large as it is now.
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
