"""Which sample of which source is global sample i, in a history whose mixture may change and that may pass samples over.

Each source has an order of its own, in which it is read wherever it has a turn: its m-th sample, m = 0, 1, ..., is window
permutation_e(m mod n) of its n windows, in its epoch e = m div n. So an epoch shows each window once before the next one
begins, and a source that is exhausted, or smaller than a batch, continues with its next epoch.

A history is a list of segments, each with a mixture (forge/data/mixture.py). When another mixture comes into force each
source continues where it stands, and a source that was left out continues when it comes back. Sources are recognised by their
content. What a roll-back passes over is a range of global numbers, which are not read, and a range of m of each source, which
is skipped under any later mixture.

From a seed, the segments and the ranges all of it is a pure function of i, with O(sources x changes) state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from forge.data.mixture import Mixture
from forge.data.permutation import key_of

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Segment:
    """From global sample `start` on, `weights` are in force, in blocks of `block`; of each source, `drawn` samples were
    drawn before. Both have an entry for each source the history has had by then, in the order of their first use."""

    start: int
    block: int
    weights: tuple[float, ...]
    drawn: tuple[int, ...]


@dataclass(frozen=True)
class PassedOver:
    """Global samples from `first_sample` up to, not including, `end_sample` are not read, and neither are those samples of
    each source, as [from, up to] in its own order: the same ones, where the mixture was not another."""

    first_sample: int
    end_sample: int
    drawn: Mapping[str, Sequence[int]] = field(default_factory=dict, compare=False)


class Stretch(NamedTuple):
    """Global samples from `start` on in which the sources simply take turns."""

    start: int
    mixture: Mixture
    drawn: list[int]  # of each source before `start`
    turns: list[int]  # that the mixture would have given each source before `start`


class Order:
    """`sources` names the sources the history has had, in the order of their first use; it and `segments` only grow."""

    def __init__(
        self,
        seed: int,
        sources: Sequence[str],
        segments: Sequence[Segment],
        passed_over: Iterable[PassedOver] = (),
    ):
        self.seed, self.sources, self.segments = seed, tuple(sources), tuple(segments)
        self.passed_over = tuple(passed_over)
        self.gaps = merge((one.first_sample, one.end_sample) for one in self.passed_over)
        """Ranges of global samples that are never read."""
        ranges = [[one.drawn[name] for one in self.passed_over if name in one.drawn] for name in self.sources]
        self._skipped = [merge((first, end) for first, end in of_source) for of_source in ranges]
        self._stretches: list[Stretch] = []
        for number, segment in enumerate(self.segments):
            stop = self.segments[number + 1].start if number + 1 < len(self.segments) else None
            self._add_stretches(segment, stop)
        self._starts = [stretch.start for stretch in self._stretches]

    @classmethod
    def beginning(cls, seed: int, sources: Sequence[str], weights: Sequence[float], block: int) -> Order:
        """The order of a new history."""
        return cls(seed, sources, [Segment(0, block, tuple(weights), (0,) * len(sources))])

    def _add_stretches(self, segment: Segment, stop: int | None) -> None:
        mixture, start = Mixture(segment.weights, self.seed, segment.block), segment.start
        drawn = self._padded(segment.drawn)
        ends = [end for _, end in self.gaps if end > start and (stop is None or end < stop)]
        for begin in [start, *ends]:
            if begin > start:
                drawn = self.drawn(begin, self._stretches[-1])
            self._stretches.append(Stretch(begin, mixture, drawn, self._padded(mixture.turns(begin))))

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (source, m) of global sample `sample`, which is in no gap: it is the m-th sample of that source."""
        stretch = self._stretches[bisect_right(self._starts, sample) - 1]
        source, turns = stretch.mixture.turn(sample)
        taken = turns - stretch.turns[source]
        return source, nth_outside(stretch.drawn[source], taken, self._skipped[source])

    def drawn(self, sample: int, stretch: Stretch | None = None) -> list[int]:
        """Return the m of each source's first sample at or after global sample `sample`."""
        stretch = stretch or self._stretches[bisect_right(self._starts, sample) - 1]
        # In the gap after a stretch no source has a turn.
        sample = min([sample, *(first for first, _ in self.gaps if first >= stretch.start)])
        taken = zip(self._padded(stretch.mixture.turns(sample)), stretch.turns, strict=True)
        return [
            nth_outside(drawn, now - then, skipped)
            for drawn, (now, then), skipped in zip(stretch.drawn, taken, self._skipped, strict=True)
        ]

    def _padded(self, counts: Sequence[int]) -> list[int]:
        """With a 0 for each source that came later."""
        return [*counts, *[0] * (len(self.sources) - len(counts))]

    def nth(self, position: int, n: int) -> int:
        """Return the n-th global sample (from 0) at or after `position` that is in no gap."""
        return nth_outside(position, n, self.gaps)

    def key(self, source: int, epoch: int) -> int:
        """The key of a source's permutation in an epoch."""
        # Later sources by name: where a history is restarted before they came, they may come in another order.
        name = source if source < len(self.segments[0].weights) else self.sources[source]
        return key_of(self.seed, "epoch", name, epoch)

    def continued(
        self,
        weights: Mapping[str, float],
        block: int,
        position: int,
        caps: Mapping[str, int] | None = None,
    ) -> Order:
        """Return this order up to global sample `position`, and from there on with these weights of sources by name.

        caps: the number of samples after which a source is left out, by name. Where all sources are, the order goes on with
        the last ones: see `capped_at`.
        """
        caps = caps or {}
        sources = (*self.sources, *(name for name in weights if name not in self.sources))
        drawn = [*self.drawn(position), *[0] * (len(sources) - len(self.sources))]
        configured = tuple(float(weights.get(name, 0.0)) for name in sources)
        limits = [caps.get(name) for name in sources]
        wanted = _uncapped(configured, drawn, limits) or configured
        # Later segments are what caps were going to do.
        past = [segment for segment in self.segments if segment.start <= position]
        order = (
            Order(self.seed, self.sources, past, self.passed_over) if len(past) < len(self.segments) else self
        )
        if (wanted, block) != (past[-1].weights, past[-1].block):
            past = [segment for segment in past if segment.start < position]
            segments = [*past, Segment(position, block, wanted, tuple(drawn))]
            order = Order(self.seed, sources, segments, self.passed_over)
        while (end := order.capped_at(position, limits)) is not None:
            drawn = order.drawn(end)
            if not (wanted := _uncapped(wanted, drawn, limits)):
                break
            segments = [*order.segments, Segment(end, block, wanted, tuple(drawn))]
            order, position = Order(self.seed, sources, segments, self.passed_over), end
        return order

    def capped_at(self, position: int, limits: Sequence[int | None]) -> int | None:
        """Return the first global sample after `position` at which a source in force has given its limit; None: never.

        limits: of `self.sources`, in that order; None: no limit. The last mixture is in force.
        """
        weights = self.segments[-1].weights
        capped = [
            number
            for number, limit in enumerate(limits[: len(weights)])
            if limit is not None and weights[number] > 0
        ]

        def reached(sample: int) -> bool:
            drawn = self.drawn(sample)
            return any(drawn[number] >= (limits[number] or 0) for number in capped)

        if not capped:
            return None
        low, step = position, 1
        while not reached(low + step):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reached(middle) else (middle, high)
        return high

    def passing_over(self, ranges: Iterable[PassedOver]) -> Order:
        """Return this order without these samples, which are all that are passed over."""
        return Order(self.seed, self.sources, self.segments, ranges)

    def between(self, first: int, end: int, later: Order | None = None) -> dict[str, list[int]]:
        """Return from where up to where, in its own order, each source is read by global samples first ... end - 1.

        Where the mixture has changed in between, `later` is the order after that.
        """
        later = later or self
        ranges = zip(later.sources, later._padded(self.drawn(first)), later.drawn(end), strict=True)
        return {name: [start, stop] for name, start, stop in ranges if start < stop}

    def count_between(self, source: str, first: int, end: int) -> int:
        """Return how many of samples first ... end - 1 of a source's own order are not passed over."""
        skipped = self._skipped[self.sources.index(source)]
        return end - first - sum(max(0, min(end, stop) - max(first, start)) for start, stop in skipped)

    def state(self) -> dict[str, Any]:
        """Return sources and segments as JSON; what is passed over is saved with the roll-backs."""
        return {
            "sources": list(self.sources),
            "segments": [asdict(segment) for segment in self.segments],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], seed: int) -> Order:
        """Return the order of a checkpoint from the result of `state` and from `run.seed`."""
        segments = [
            Segment(one["start"], one["block"], tuple(one["weights"]), tuple(one["drawn"]))
            for one in state["segments"]
        ]
        return cls(seed, state["sources"], segments)


def _uncapped(
    weights: Sequence[float], drawn: Sequence[int], limits: Sequence[int | None]
) -> tuple[float, ...]:
    """Weights without the sources that have given their limit; empty if none is left."""
    left = tuple(
        0.0 if limit is not None and given >= limit else weight
        for weight, given, limit in zip(weights, drawn, limits, strict=True)
    )
    return left if any(left) else ()


def numbered(names: Iterable[str]) -> list[str]:
    """Return the same names, each that comes again with a number: in an `Order` sources are named by their fingerprints."""
    counts: Counter[str] = Counter()
    found = []
    for name in names:
        counts[name] += 1
        found.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return found


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return sorted, disjoint ranges `(first, end)` of the same numbers; end is the first one after a range."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted((first, end) for first, end in ranges if first < end):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)


def nth_outside(position: int, n: int, ranges: Ranges) -> int:
    """Return the n-th number (from 0) at or after `position` that is in none of the ranges (see `merge`)."""
    for first, end in ranges:
        if end <= position:
            continue
        if position + n < first:
            break
        n -= max(0, first - position)
        position = end
    return position + n
