"""`whole_plan`: extrapolate the plan of a model from pairs of plans. The two small models of a pair differ in one size."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeAlias, TypeVar

from forge.tools.plan.estimate import Spent, StepTime
from forge.tools.plan.stage import StagePlan
from forge.tools.plan.trace import Moment, Peak

Key = TypeVar("Key")
Times: TypeAlias = tuple[StepTime, ...] | None


@dataclass(frozen=True)
class Growth:
    """The plans of two small models that differ in one size. The whole model's plan adds their difference several times.

    of_peaks, of_kept, steps: how often the difference is added to memory peaks, to the activations kept for backward,
    and to every other quantity.
    """

    small: StagePlan
    large: StagePlan
    steps: float
    of_peaks: float
    of_kept: float


def whole_plan(growths: list[Growth], names: list[str], whole: int | None = None) -> StagePlan:
    """Return the plan of a rank with layers `names`: `growths[0].large`, plus the differences of all `growths`.

    A `Growth` says how often its difference is added. whole: number of buckets in the whole model, assumed equal in size;
    None for an engine without buckets.
    """
    first, large = growths[0], growths[0].large

    def along(of: Callable[[StagePlan], Mapping[Key, float]]) -> dict[Key, int]:
        found: dict[Key, float] = dict(of(large))
        for growth in growths:
            before, after = of(growth.small), of(growth.large)
            for key in {**before, **after}:
                found[key] = found.get(key, 0) + growth.steps * (after.get(key, 0) - before.get(key, 0))
        return {key: round(value) for key, value in found.items()}

    def number(of: Callable[[StagePlan], int]) -> int:
        return along(lambda plan: {"": of(plan)})[""]

    kept: float = large.kept + sum(
        growth.of_kept * (growth.large.kept - growth.small.kept) for growth in growths
    )
    peaks = {}
    for place, after in large.peaks.items():
        base = place
        if place not in first.small.peaks:
            base = (place[0], "layer -1")
            if base not in first.small.peaks or (place[0], "layer -2") in first.small.peaks:
                continue
            # The smaller model lacks this middle layer. Take the peak of layer -2, which grows like that of layer -1.
            place = (place[0], "layer -2")
        size = float(after.size)
        kinds: dict[str, float] = defaultdict(float, after.kinds)
        for growth in growths:
            if base not in growth.large.peaks:
                continue
            low, high = growth.small.peaks[base], growth.large.peaks[base]
            size += growth.of_peaks * (high.size - low.size)
            for kind in {**low.kinds, **high.kinds}:
                kinds[kind] += growth.of_peaks * (high.kinds.get(kind, 0) - low.kinds.get(kind, 0))
        rounded = {kind: round(value) for kind, value in kinds.items()}
        peaks[place] = Peak(round(size), _named(place, after.moment, names), rounded)
    return replace(
        large,
        state=along(lambda plan: plan.state),
        peaks=peaks,
        kept=round(kept),
        flops={place: float(value) for place, value in along(lambda plan: plan.flops).items()},
        times=_times(growths),
        collectives=_calls(growths, whole),
        host=number(lambda plan: plan.host),
        checkpoint=number(lambda plan: plan.checkpoint),
        offloaded=number(lambda plan: plan.offloaded),
        state_on_host=number(lambda plan: plan.state_on_host),
    )


def _calls(growths: list[Growth], whole: int | None) -> Counter[tuple[str, str, int, bool]]:
    """Count the collectives of the whole model. Return (axis, kind, bytes, hideable) -> calls.

    Only `growths[0]` is read: the others come from attention residuals and add no collectives. whole: number of buckets;
    None without buckets.
    """
    small, large, steps = growths[0].small, growths[0].large, growths[0].steps

    def number(before: int, after: int) -> int:
        return round(after + steps * (after - before))

    fixed = {key: calls for key, calls in large.collectives.items() if key in small.collectives}
    calls = Counter({key: number(small.collectives[key], fixed[key]) for key in fixed})
    # Some calls are for several layers together. Their size depends on the number of layers.
    before_of, after_of = (_of_other_sizes(traced, fixed) for traced in (small, large))
    for key, after in after_of.items():
        before = before_of[key]
        if whole is None and len(before) == len(after):
            sizes = [number(*pair) for pair in zip(before, after, strict=True)]
        else:
            times = (
                number(len(before), len(after))
                if whole is None
                else round(len(after) * whole / large.buckets)
            )
            sizes = [round(number(sum(before), sum(after)) / times)] * times
        for size in sizes:
            calls[*key[:2], size, key[2]] += 1
    return calls


def _named(place: tuple[str, str], moment: Moment, names: list[str]) -> Moment:
    """Return `moment` with the layer's name in the whole model, taken from `names`.

    place: (phase, "layer N"); a negative N counts from the last layer.
    """
    match = re.fullmatch(r"layer (-?\d+)", place[1])
    return replace(moment, part=names[int(match[1])]) if match else moment


def _each(
    first: Times, second: Times, combine: Callable[[StepTime, StepTime], StepTime]
) -> tuple[StepTime, ...] | None:
    """Call `combine` on the times of two plans, once per element of `estimate.PACES`. None if either plan has no times."""
    if first is None or second is None:
        return None
    return tuple(combine(a, b) for a, b in zip(first, second, strict=True))


def _times(growths: list[Growth]) -> Times:
    """Return the times of the whole model, one per element of `estimate.PACES`; None if the plans have no times."""
    large = growths[0].large.times
    if large is None:
        return None
    return tuple(
        _time(one, [(_at(growth.small, pace), _at(growth.large, pace), growth.steps) for growth in growths])
        for pace, one in enumerate(large)
    )


def _at(plan: StagePlan, pace: int) -> StepTime:
    assert plan.times is not None
    return plan.times[pace]


def _time(large: StepTime, growths: list[tuple[StepTime, StepTime, float]]) -> StepTime:
    def whole(of: Callable[[StepTime], Spent]) -> Spent:
        values = list(astuple(of(large)))
        for low, high, steps in growths:
            for field, (before, after) in enumerate(zip(astuple(of(low)), astuple(of(high)), strict=True)):
                values[field] += steps * (after - before)
        return Spent(*(max(0.0, value) for value in values))

    def at(phase: str, number: int) -> Spent:
        return whole(lambda time: getattr(time, phase)[number])

    return StepTime(
        {number: at("forward", number) for number in large.forward},
        {number: at("backward", number) for number in large.backward},
        whole(lambda time: time.update),
    )


def with_more(one: StagePlan, microbatches: int, size: int) -> StagePlan:
    """Return the plan `one` with `microbatches` additional microbatches in flight. Each keeps `size` bytes for backward."""
    peaks = dict(one.peaks)
    for place, peak in one.peaks.items():
        if place[0] in ("forward", "backward"):
            peaks[place] = peak.with_more("activations", microbatches * size)
    return replace(one, peaks=peaks)


def with_state(one: StagePlan, whole: StagePlan) -> StagePlan:
    """Return the plan `one` with the state bytes of `whole`, a plan traced with all layers of the rank.

    Memory peaks grow by the difference between the lasting tensors of `whole` and `one`. These include tensors that
    checkpoints lack, e.g. the block indices of int8 optimizer state.
    """
    lasting, own = (max(peak.kinds.get("state", 0) for peak in plan.peaks.values()) for plan in (whole, one))
    peaks = {place: peak.with_more("state", lasting - own) for place, peak in one.peaks.items()}
    same = {
        name: getattr(whole, name) for name in ("state", "host", "checkpoint", "buckets", "state_on_host")
    }
    return replace(one, peaks=peaks, **same)


def with_update(one: StagePlan, update: StagePlan) -> StagePlan:
    """Return the sum of two plans. `one` lacks the optimizer's part of a step, and `update` has only this part."""
    one = with_more(one, 1, update.kept)
    peaks, flops = dict(one.peaks), Counter(one.flops)
    for place, peak in update.peaks.items():
        peaks[place] = max(peak, one.peaks.get(place, peak), key=lambda peak: peak.size)
    flops.update(update.flops)
    times = _each(one.times, update.times, lambda a, b: replace(a, update=a.update + b.update))
    return replace(
        one, peaks=peaks, flops=dict(flops), times=times, collectives=one.collectives + update.collectives
    )


def _of_other_sizes(traced: StagePlan, fixed: Mapping[Any, int]) -> dict[tuple[str, str, bool], list[int]]:
    """Return a dict from (axis, kind, hideable) to the bytes of each call, ascending.

    The dict has the collectives in `traced` that are missing in `fixed`.
    """
    found: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
    for (axis, kind, size, hidden), number in sorted(traced.collectives.items()):
        if (axis, kind, size, hidden) not in fixed:
            found[axis, kind, hidden] += [size] * number
    return found
