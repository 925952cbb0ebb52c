"""Samples that a run skips after a roll-back, and the order of the others.

The position in the data is one integer. With the skipped ranges it determines the samples of any step, on any number of
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return sorted, disjoint ranges `(first, end)` of the same samples; end is the first sample after a range."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted((first, end) for first, end in ranges if first < end):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)


def nth_sample(position: int, n: int, passed_over: Ranges) -> int:
    """Return the n-th sample (from 0) at or after `position` that is outside the ranges (see `merge`)."""
    for first, end in passed_over:
        if end <= position:
            continue
        if position + n < first:
            break
        n -= max(0, first - position)
        position = end
    return position + n
