"""Samples that a run has given up, and the order of those that are left.

The position in the data stays one integer. The run keeps beside it the ranges that it passes over, so the samples of
any step follow from both, whenever and on however many ranks they are read.
"""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, disjoint ranges `(first, end)` of the same samples; end is the first sample after a range."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted((first, end) for first, end in ranges if first < end):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)


def nth_sample(position: int, n: int, passed_over: Ranges) -> int:
    """Number of the n-th sample (the 0th is the first) from `position` on, of those outside the ranges (as of `merge`)."""
    for first, end in passed_over:
        if end <= position:
            continue
        if position + n < first:
            break
        n -= max(0, first - position)
        position = end
    return position + n
