"""Global sample i -> (source, sample of the source), under all mixtures that a run has used and all skipped ranges.

Each source is read in its own order, independently of the other sources. The m-th sample, m = 0, 1, ..., of a source
with n windows (samples) is in epoch e = m div n and is window permutation_e(m mod n). An epoch thus reads each window
once before the next epoch begins. An exhausted source, or a source smaller than a batch, continues with its next epoch.

The mixtures form a list of segments, one `Mixture` each. Under a new mixture each source continues at its own position,
even if it was left out in between. Sources are identified by their content.

A roll-back skips a range of global samples. Each source's samples in this range are also skipped under any later
mixture.

For a given seed, segments and ranges, everything is a pure function of i, with O(sources x changes) state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import lru_cache
from math import ceil, isfinite, lcm
from typing import Any, NamedTuple

import numpy as np

from forge.config.phases import SMALLEST_SHARE
from forge.data.permutation import hash_positions, key_of
from forge.runtime.errors import UserError

Ranges = tuple[tuple[int, int], ...]


class Mixture:
    """The source of each global sample, in proportion to `weights`: a pure function of (weights, seed, block, i).

    Each global sample comes from one source, and counts as one turn of this source. Samples come in blocks of B. C_0 = 0,
    ..., C_S = 1 are the cumulative normalised weights. Before block b, the number of turns of source s is

        turns_s(b) = floor(b B C_{s+1}) - floor(b B C_s)

    This number differs from the source's exact share by less than one, and the numbers of all sources add up to b B.
    Within a block, a keyed hash shuffles the turns. `Order` selects the source's sample for each turn. Weights are exact
    fractions and sample numbers exact integers, so there is no drift even at 10^13 samples.

    weights: may have any sum; 0: the source is never read. block: number of samples per shuffled block, raised to at
    least 1 / (smallest positive share). With smaller blocks, rounding could make turns_s(b), a source's total before
    block b, decrease as b grows. Raises UserError for a share below 1e-6.
    """

    def __init__(self, weights: Sequence[float], seed: int, block: int = 1024):
        assert block >= 1
        if any(not isfinite(weight) or weight < 0 for weight in weights) or not any(weights):
            raise UserError(
                f"data.sources: weights must be finite, not negative and not all 0, got {list(weights)}"
            )
        # The user's decimal, not the nearest binary fraction: 0.1 is one tenth.
        exact = [Fraction(str(weight)) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        self.seed = seed
        smallest = min(share for share in shares if share > 0)
        if smallest < SMALLEST_SHARE:
            raise UserError(
                f"data.sources: the smallest of the weights {list(weights)} is less than a millionth of their sum; "
                "raise it, or set it to 0 to leave the source out"
            )
        self.block = max(block, ceil(1 / smallest))
        self._denominator = lcm(*(share.denominator for share in shares))
        numerators = [int(share * self._denominator) for share in shares]
        self._cumulative = [sum(numerators[:s]) for s in range(len(shares) + 1)]
        self._order = lru_cache(maxsize=4)(
            self._make_order
        )  # the loader reads within a block or at the boundary of two

    def turn(self, sample: int) -> tuple[int, int]:
        """Return (source of global sample `sample`, number of earlier global samples of this source)."""
        block, position = divmod(sample, self.block)
        sources, ranks = self._order(block)
        source = int(sources[position])
        before = self._before(block)
        return source, before[source + 1] - before[source] + int(ranks[position])

    def turns(self, sample: int) -> list[int]:
        """Return the number of samples of each source among global samples 0 ... sample - 1."""
        block, position = divmod(sample, self.block)
        before = self._before(block)
        within = np.bincount(self._order(block)[0][:position], minlength=len(before) - 1).tolist()
        return [end - start + more for start, end, more in zip(before[:-1], before[1:], within, strict=True)]

    def _before(self, block: int) -> list[int]:
        """Return, for s = 0 ... S, the number of samples of sources 0 to s - 1 before block `block`. S: number of sources."""
        samples = block * self.block
        return [samples * cumulative // self._denominator for cumulative in self._cumulative]

    def _make_order(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each position of a block, its source and the number of earlier positions with this source.

        Both are int64 `[block]`.
        """
        before, after = self._before(block), self._before(block + 1)
        firsts = [end - start for start, end in zip(before, after, strict=True)]
        counts = np.diff(firsts)
        draws = hash_positions(0, self.block, key_of(self.seed, "mixture block", block))
        sources = np.repeat(np.arange(len(counts)), counts)[np.argsort(draws, kind="stable")]
        ranks = np.empty(self.block, np.int64)
        ranks[np.argsort(sources, kind="stable")] = np.arange(self.block) - np.repeat(firsts[:-1], counts)
        return sources, ranks


@dataclass(frozen=True)
class Segment:
    """A mixture of sources. `weights` apply from global sample `start`, in shuffled blocks of `block` samples.

    drawn: index of each source's next sample at `start`, in the source's own order. weights and drawn have one entry
    for each source that the run has used so far, in the order of first use.
    """

    start: int
    block: int
    weights: tuple[float, ...]
    drawn: tuple[int, ...]


@dataclass(frozen=True)
class SkippedRange:
    """Skipped samples: global samples first_sample ... end_sample - 1.

    drawn: source -> [first, end), the skipped samples as indices in the source's own order. A change of the mixture
    does not change these indices.
    """

    first_sample: int
    end_sample: int
    drawn: Mapping[str, Sequence[int]] = field(default_factory=dict, compare=False)


class Stretch(NamedTuple):
    """A range of global samples from `start`, without a skipped range and without a change of the mixture."""

    start: int
    mixture: Mixture
    drawn: list[int]  # index of each source's next sample at `start`, in its own order
    turns: list[int]  # turns of each source before `start`, as if `mixture` had applied from sample 0


class Order:
    """The order in which a run reads the samples of all sources, from its first step on.

    sources: names in the order of first use. Continuing the order only appends to `sources` and `segments`.
    """

    def __init__(
        self,
        seed: int,
        sources: Sequence[str],
        segments: Sequence[Segment],
        passed_over: Iterable[SkippedRange] = (),
    ):
        self.seed, self.sources, self.segments = seed, tuple(sources), tuple(segments)
        self.passed_over = tuple(passed_over)
        self.gaps = merge((one.first_sample, one.end_sample) for one in self.passed_over)
        """Ranges of skipped global samples."""
        ranges = [[one.drawn[name] for one in self.passed_over if name in one.drawn] for name in self.sources]
        self._skipped = [merge((first, end) for first, end in of_source) for of_source in ranges]
        self._stretches: list[Stretch] = []
        for number, segment in enumerate(self.segments):
            stop = self.segments[number + 1].start if number + 1 < len(self.segments) else None
            self._add_stretches(segment, stop)
        self._starts = [stretch.start for stretch in self._stretches]

    @classmethod
    def beginning(cls, seed: int, sources: Sequence[str], weights: Sequence[float], block: int) -> Order:
        """Return the order of a run that begins at sample 0 with these sources."""
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
        """Return (source, m): global sample `sample` is the m-th sample of the source with index `source`.

        `sample` must not be in a skipped range.
        """
        stretch = self._stretches[bisect_right(self._starts, sample) - 1]
        source, turns = stretch.mixture.turn(sample)
        taken = turns - stretch.turns[source]
        return source, nth_outside(stretch.drawn[source], taken, self._skipped[source])

    def drawn(self, sample: int, stretch: Stretch | None = None) -> list[int]:
        """Return, for each source, the index of its first sample at or after global sample `sample`.

        An index counts the samples in the source's own order, from 0.
        """
        stretch = stretch or self._stretches[bisect_right(self._starts, sample) - 1]
        # The skipped range after a stretch has no sample of any source. It may have begun before the stretch.
        ends = (max(first, stretch.start) for first, end in self.gaps if end > stretch.start)
        sample = min([sample, *ends])
        taken = zip(self._padded(stretch.mixture.turns(sample)), stretch.turns, strict=True)
        return [
            nth_outside(drawn, now - then, skipped)
            for drawn, (now, then), skipped in zip(stretch.drawn, taken, self._skipped, strict=True)
        ]

    def weights_at(self, sample: int) -> list[float]:
        """Return the weight of each source in the mixture of global sample `sample`. 0: not read."""
        number = bisect_right([segment.start for segment in self.segments], sample) - 1
        weights = self.segments[number].weights
        return [*weights, *[0.0] * (len(self.sources) - len(weights))]

    def _padded(self, counts: Sequence[int]) -> list[int]:
        """Return `counts`, extended by zeros to one entry per source. Later sources have no entry in older segments."""
        return [*counts, *[0] * (len(self.sources) - len(counts))]

    def nth(self, position: int, n: int) -> int:
        """Return the n-th (from 0) unskipped global sample at or after `position`."""
        return nth_outside(position, n, self.gaps)

    def key(self, source: int, epoch: int) -> int:
        """Return the key of a source's permutation in an epoch."""
        # Sources added later enter the key by name, because a run resumed from an earlier checkpoint may add them in
        # another order.
        name = source if source < len(self.segments[0].weights) else self.sources[source]
        return key_of(self.seed, "epoch", name, epoch)

    def continued(
        self,
        weights: Mapping[str, float],
        block: int,
        position: int,
        caps: Mapping[str, int] | None = None,
    ) -> Order:
        """Return this order up to global sample `position`, continued with `weights`.

        weights: source name -> weight. caps: source name -> number of samples read, without skipped
        samples, after which the source is left out (see `capped_at`). Once all sources have reached their caps, the last
        sources to do so continue to be read.
        """
        caps = caps or {}
        sources = (*self.sources, *(name for name in weights if name not in self.sources))
        drawn = [*self.drawn(position), *[0] * (len(sources) - len(self.sources))]
        configured = tuple(float(weights.get(name, 0.0)) for name in sources)
        limits = [caps.get(name) for name in sources]
        wanted = _uncapped(configured, self._read(drawn), limits) or configured
        # Drop later segments, planned for the old caps.
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
            if not (wanted := _uncapped(wanted, order._read(drawn), limits)):
                break
            segments = [*order.segments, Segment(end, block, wanted, tuple(drawn))]
            order, position = Order(self.seed, sources, segments, self.passed_over), end
        return order

    def capped_at(self, position: int, limits: Sequence[int | None]) -> int | None:
        """Return the first global sample after `position` at which a source of the last mixture has reached its limit.

        None: no source ever reaches a limit. limits: one per entry of `self.sources`; None: no limit.
        """
        weights = self.segments[-1].weights
        capped = [
            number
            for number, limit in enumerate(limits[: len(weights)])
            if limit is not None and weights[number] > 0
        ]

        def reached(sample: int) -> bool:
            read = self._read(self.drawn(sample))
            return any(read[number] >= (limits[number] or 0) for number in capped)

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

    def passing_over(self, ranges: Iterable[SkippedRange]) -> Order:
        """Return a copy of this order that skips exactly `ranges`, in place of this order's skipped ranges."""
        return Order(self.seed, self.sources, self.segments, ranges)

    def between(self, first: int, end: int, later: Order | None = None) -> dict[str, list[int]]:
        """Return source -> range [begin, stop) of the source's samples among global samples `first` to `end` - 1.

        A range counts the samples in the source's own order. Sources without such samples are left out.
        later: the order at `end`, if the mixture has changed since `first`; None: this order.
        """
        later = later or self
        ranges = zip(later.sources, later._padded(self.drawn(first)), later.drawn(end), strict=True)
        return {name: [start, stop] for name, start, stop in ranges if start < stop}

    def _read(self, drawn: Sequence[int]) -> list[int]:
        """Return the number of samples read of each source. drawn: the index of each source's next sample."""
        skipped = [*self._skipped, *[()] * (len(drawn) - len(self._skipped))]
        return [unskipped(0, end, of_source) for end, of_source in zip(drawn, skipped, strict=True)]

    def count_between(self, source: str, first: int, end: int) -> int:
        """Return the number of unskipped samples among samples `first` to `end` - 1 of `source`, counted in its own order."""
        return unskipped(first, end, self._skipped[self.sources.index(source)])

    def state(self) -> dict[str, Any]:
        """Return sources and segments as JSON. Skipped ranges are saved with the roll-backs."""
        return {
            "sources": list(self.sources),
            "segments": [asdict(segment) for segment in self.segments],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], seed: int) -> Order:
        """Return the order of a checkpoint, from the result of `state` and `run.seed`."""
        segments = [
            Segment(one["start"], one["block"], tuple(one["weights"]), tuple(one["drawn"]))
            for one in state["segments"]
        ]
        return cls(seed, state["sources"], segments)


def _uncapped(
    weights: Sequence[float], drawn: Sequence[int], limits: Sequence[int | None]
) -> tuple[float, ...]:
    """Return `weights` with 0 for each source that has reached its limit. Empty if all weights would be 0.

    drawn: number of samples read of each source. limits: None: no limit.
    """
    left = tuple(
        0.0 if limit is not None and given >= limit else weight
        for weight, given, limit in zip(weights, drawn, limits, strict=True)
    )
    return left if any(left) else ()


def numbered(names: Iterable[str]) -> list[str]:
    """Return `names` with the repetitions of a name changed to name#2, name#3, ..."""
    counts: Counter[str] = Counter()
    found = []
    for name in names:
        counts[name] += 1
        found.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return found


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of the ranges (first, end) as sorted, disjoint ranges. `end` is exclusive."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted((first, end) for first, end in ranges if first < end):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)


def unskipped(first: int, end: int, ranges: Ranges) -> int:
    """Return the number of integers from `first` to `end` - 1 outside all ranges. ranges: from `merge`."""
    return end - first - sum(max(0, min(end, stop) - max(first, start)) for start, stop in ranges)


def nth_outside(position: int, n: int, ranges: Ranges) -> int:
    """Return the n-th integer (from 0) at or after `position` outside all ranges.

    ranges: sorted and disjoint, from `merge`.
    """
    for first, end in ranges:
        if end <= position:
            continue
        if position + n < first:
            break
        n -= max(0, first - position)
        position = end
    return position + n
