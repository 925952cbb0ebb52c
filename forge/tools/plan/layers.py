"""`plan_stages`: plans of all stages. Layers that are equal are traced two or three times and multiplied.

Two smaller models are traced. What a layer adds is what the larger has more than the smaller, at each place of a step:
the peak of the whole may be at another place than theirs. Of a long pipeline three ranks are traced: the first, one from
the middle and the last; a rank with more microbatches in flight holds that many more times what one keeps.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeAlias, TypeVar

from torch import nn

from forge.config import Config, Degrees
from forge.parallel.build import build_meta_model
from forge.parallel.pipeline import plan_pipeline
from forge.parallel.pipeline.schedule import Action, Schedule
from forge.tools.plan.estimate import Spent, StepTime
from forge.tools.plan.hardware import Hardware
from forge.tools.plan.stage import TRACED, StagePlan, fewer_microbatches, plan_stage
from forge.tools.plan.trace import Moment, Peak

Key = TypeVar("Key")
Times: TypeAlias = tuple[StepTime, ...] | None
# Schedules of which a few ranks with a few microbatches show what many do.
SHORTENED = ("1F1B", "Interleaved1F1B")
# Results of `kinds_of_layers` by model and sequence length.
_KINDS: dict[str, list[Any]] = {}


def plan_stages(
    config: Config, degrees: Degrees, hardware: Hardware | None, *, load: float = 1.0
) -> list[StagePlan]:
    """Return the plan of one rank of each rank of the pp axis; `load` as in `FakeRank`."""
    config = with_experts_first(config, degrees)
    few = few_layers(config, degrees)
    if few is None:
        return [plan_stage(config, degrees, rank, hardware, load=load) for rank in range(degrees.pp)]
    small, large = (_trace(one, config, degrees, hardware, load) for one in few)
    n_layers = config.model.n_layers
    if degrees.pp == 1:
        steps = (n_layers - few[1].layers) / (few[1].layers - few[0].layers)
        one = _extrapolate(small[0], large[0], steps, _names(config), config, degrees, hardware)
        return [replace(one, layers=f"all {n_layers} layers")]
    return _all_ranks(config, degrees, few, small, large, hardware)


def with_experts_first(config: Config, degrees: Degrees) -> Config:
    """Return `config`, of a deep pipeline whose first layers alone are dense with experts in these, too, as in the others.

    So that few layers show what many need. DeepSeek's dense layers compute as much as those with experts.
    """
    moe = config.model.moe
    if degrees.pp == 1 or moe is None or not moe.n_dense_layers or few_layers(config, degrees) is not None:
        return config
    experts = config.model.model_copy(update={"moe": moe.model_copy(update={"n_dense_layers": 0})})
    changed = config.model_copy(update={"model": experts})
    return config if few_layers(changed, degrees) is None else changed


def _names(config: Config) -> list[str]:
    """Return the names of all layers, those that predict further ahead behind the others."""
    return [f"layers.{index}" for index in range(config.model.n_layers + config.model.mtp_depth)]


@dataclass(frozen=True)
class Few:
    """A smaller model: `layers` in all, `per_stage` in a stage; `ranks` of the pp axis, microbatches that are traced."""

    layers: int
    per_stage: int
    ranks: int = 1
    microbatches: int | None = None


def few_layers(config: Config, degrees: Degrees) -> tuple[Few, Few] | None:
    """Return the two smaller models; None if the layers are too few or too different, so that all are traced."""
    n_layers = config.model.n_layers
    every = kinds_of_layers(config)
    kinds, ahead = every[:n_layers], every[n_layers:]
    if degrees.pp == 1:
        # After `lead` layers of their own kinds, those of a period come again and again.
        lead, period = next(
            (lead, period)
            for period in range(1, n_layers + 1)
            for lead in range(min(period + 4, n_layers))
            if kinds[lead : n_layers - period] == kinds[lead + period :]
        )
        first = lead + (n_layers - lead) % period + 2 * period
        sizes = (first, first + period)
        if sizes[1] >= n_layers:
            return None
        found = Few(sizes[0], sizes[0]), Few(sizes[1], sizes[1])
        same = all(kinds_of_layers(_smaller(config, one)) == [*kinds[: one.layers], *ahead] for one in found)
        return found if same else None
    plan = plan_pipeline(config, degrees)
    counts, stages = [len(stage.layers) for stage in plan.stages], len(plan.stages)
    if config.pipeline.schedule not in SHORTENED or len(set(kinds)) > 1 or min(counts) < 3:
        return None
    ranks, per_rank = min(3, degrees.pp), stages // degrees.pp
    # Stages that take turns on a rank have all that can be in flight only behind a round of all ranks.
    microbatches = 2 * ranks if per_rank > 1 else 3
    if degrees.accumulation < microbatches:
        return None
    return (
        Few(2 * ranks * per_rank, 2, ranks, microbatches),
        Few(3 * ranks * per_rank, 3, ranks, microbatches),
    )


def traced_layers(config: Config, degrees: Degrees) -> int:
    """Return the number of layers that a plan runs forward and backward: its cost, in another unit than time."""
    config = with_experts_first(config, degrees)
    few, steps = few_layers(config, degrees), 2
    if degrees.pp == 1:
        layers = config.model.n_layers if few is None else sum(one.layers for one in few)
        return layers * (1 + min(TRACED, degrees.accumulation))  # the first step has one microbatch
    if few is None:
        return steps * config.model.n_layers * fewer_microbatches(config, degrees).accumulation
    return steps * sum(one.layers * (one.microbatches or 1) for one in few)


def kinds_of_layers(config: Config) -> list[Any]:
    """Return a value for each layer, and for those that predict further ahead: equal if modules, shapes and settings are."""
    key = f"{config.model.model_dump_json()} {config.train.seq_len}"
    if key not in _KINDS:  # a search asks for hundreds of layouts of the same model
        kinds: dict[str, int] = {}
        layers = build_meta_model(config).layers.values()
        _KINDS[key] = [
            kinds.setdefault(_describe(layer, index), len(kinds)) for index, layer in enumerate(layers)
        ]
    return _KINDS[key]


def _describe(layer: nn.Module, index: int) -> str:
    modules = [
        (name, type(module).__qualname__, sorted(_settings(module, index)))
        for name, module in layer.named_modules()
    ]
    return str((modules, [(name, *values.shape) for name, values in layer.named_parameters()]))


def _settings(module: nn.Module, index: int) -> list[tuple[str, str]]:
    """Numbers and words that a module was given, but for its own place."""
    return [
        (name, str(value))
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and not (name in ("layer", "index") and value == index)
    ]


def _smaller(config: Config, few: Few) -> Config:
    update: dict[str, Any] = {"model": config.model.model_copy(update={"n_layers": few.layers})}
    if few.ranks > 1:
        update["parallel"] = config.parallel.model_copy(update={"pp": few.ranks})
        update["pipeline"] = config.pipeline.model_copy(update={"layers_per_stage": few.per_stage})
    return config.model_copy(update=update)


def _fewer_ranks(degrees: Degrees, few: Few) -> Degrees:
    return replace(degrees, pp=few.ranks, world=degrees.world // degrees.pp * few.ranks)


def _trace(
    few: Few, config: Config, degrees: Degrees, hardware: Hardware | None, load: float
) -> list[StagePlan]:
    smaller, fewer = _smaller(config, few), _fewer_ranks(degrees, few)
    return [
        plan_stage(
            smaller,
            fewer,
            rank,
            hardware,
            microbatches=few.microbatches,
            load=load,
            optimizer="without" if _shares_work(config, degrees) else "with",
        )
        for rank in range(few.ranks)
    ]


def _shares_work(config: Config, degrees: Degrees) -> bool:
    """Whether what the optimizer does on a rank is no multiple of what a layer needs, because ranks divide it by tensors."""
    optimizer = config.optimizer
    return degrees.world > degrees.pp and (optimizer.name == "muon" or optimizer.moment_dtype == "int8")


def _all_ranks(
    config: Config,
    degrees: Degrees,
    few: tuple[Few, Few],
    small: list[StagePlan],
    large: list[StagePlan],
    hardware: Hardware | None,
) -> list[StagePlan]:
    plan = plan_pipeline(config, degrees)
    assert few[0].microbatches is not None
    fewer = replace(_fewer_ranks(degrees, few[0]), accumulation=few[0].microbatches)
    traced = plan_pipeline(_smaller(config, few[0]), fewer).schedule
    stages = []
    for rank in range(degrees.pp):
        own = plan.of_rank(rank)
        names = [f"layers.{index}" for stage in own for index in stage.layers]
        role = 0 if rank == 0 else few[0].ranks - 1 if rank == degrees.pp - 1 else 1
        step = few[1].per_stage - few[0].per_stage
        steps = (len(names) / len(own) - few[1].per_stage) / step
        if any(stage.head for stage in own):
            names += _names(config)[config.model.n_layers :]
        first_rank = rank * degrees.world // degrees.pp
        one = _extrapolate(small[role], large[role], steps, names, config, degrees, hardware, rank)
        more = in_flight(plan.schedule, rank) - in_flight(traced, role)
        # More are in flight in a rank's first stage. There a microbatch also keeps what the stage before has sent.
        sizes = [0 if own[0].embed else size for _, kind, size, _ in one.collectives if kind == "recv"]
        one = _with_more(one, more, one.kept + max(sizes, default=0))
        stages.append(replace(one, pp_rank=rank, rank=first_rank, layers="; ".join(map(str, own))))
    return stages


def in_flight(schedule: Schedule, rank: int) -> int:
    """Return the most forwards of a stage that wait for their backward at once."""
    number = most = 0
    for action in schedule.order[rank]:
        number += _opens(action)
        most = max(most, number)
    return most


def _opens(action: Action) -> int:
    return {"F": 1, "B": -1}[action.kind]


def _extrapolate(
    small: StagePlan,
    large: StagePlan,
    steps: float,
    names: list[str],
    config: Config,
    degrees: Degrees,
    hardware: Hardware | None,
    pp_rank: int = 0,
) -> StagePlan:
    """Return the plan of the rank that holds the layers `names`."""
    apart = _shares_work(config, degrees)
    if not large.buckets and not apart:
        return _whole(small, large, steps, names)
    # Buckets are no multiples of what a layer needs either.
    whole = plan_stage(config, degrees, pp_rank, hardware, optimizer="alone")
    one = _with_state(_whole(small, large, steps, names, whole.buckets or None), whole)
    return _with_update(one, whole) if apart else one


def _whole(
    small: StagePlan, large: StagePlan, steps: float, names: list[str], whole: int | None = None
) -> StagePlan:
    """Return the plan of a rank with layers `names`: `large` with `steps` times what it has more than `small`.

    whole: the number of its buckets, if the engine has any; they count as if all had one size.
    """

    def growth(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, int]:
        kinds = {**first, **second}
        return {kind: round(steps * (second.get(kind, 0) - first.get(kind, 0))) for kind in kinds}

    def along(first: Mapping[Key, float], second: Mapping[Key, float]) -> dict[Key, int]:
        keys = {**first, **second}
        return {
            key: round(second.get(key, 0) + steps * (second.get(key, 0) - first.get(key, 0))) for key in keys
        }

    def number(before: int, after: int) -> int:
        return round(after + steps * (after - before))

    peaks = {}
    for place, after in large.peaks.items():
        if place in small.peaks:
            before, base = small.peaks[place], after
        elif (last := (place[0], "layer -1")) in small.peaks and (place[0], "layer -2") not in small.peaks:
            # A middle layer that the smaller does not have: for the last but one, which grows as the last does.
            before, base, place = small.peaks[last], large.peaks[last], (place[0], "layer -2")
        else:
            continue
        kinds = {
            kind: after.kinds.get(kind, 0) + size for kind, size in growth(before.kinds, base.kinds).items()
        }
        size = after.size + round(steps * (base.size - before.size))
        peaks[place] = Peak(size, _named(place, after.moment, names), kinds)
    fixed = {key: calls for key, calls in large.collectives.items() if key in small.collectives}
    calls = Counter(along({key: small.collectives[key] for key in fixed}, fixed))
    # What is sent in one call for several layers has another size for every number of layers.
    before_of, after_of = (_of_other_sizes(traced, fixed) for traced in (small, large))
    for key, (of_large, total) in after_of.items():
        of_small, total_of_small = before_of[key]
        times = number(of_small, of_large) if whole is None else round(of_large * whole / large.buckets)
        calls[*key[:2], round(number(total_of_small, total) / times), key[2]] += times
    return replace(
        large,
        state=along(small.state, large.state),
        peaks=peaks,
        kept=number(small.kept, large.kept),
        flops={place: float(value) for place, value in along(small.flops, large.flops).items()},
        times=_each(small.times, large.times, lambda a, b: _combine(a, b, steps)),
        collectives=calls,
        host=number(small.host, large.host),
        checkpoint=number(small.checkpoint, large.checkpoint),
    )


def _named(place: tuple[str, str], moment: Moment, names: list[str]) -> Moment:
    """The moment with the layer's name in the whole model."""
    match = re.fullmatch(r"layer (-?\d+)", place[1])
    return replace(moment, part=names[int(match[1])]) if match else moment


def _each(
    first: Times, second: Times, combine: Callable[[StepTime, StepTime], StepTime]
) -> tuple[StepTime, ...] | None:
    """Combine the times of each pace; None if neither plan has any."""
    if first is None or second is None:
        return None
    return tuple(combine(a, b) for a, b in zip(first, second, strict=True))


def _combine(small: StepTime, large: StepTime, steps: float) -> StepTime:
    def whole(a: Spent, b: Spent) -> Spent:
        both = zip(astuple(a), astuple(b), strict=True)
        return Spent(*(max(0.0, after + steps * (after - before)) for before, after in both))

    def all_of(a: dict[int, Spent], b: dict[int, Spent]) -> dict[int, Spent]:
        return {number: whole(a[number], spent) for number, spent in b.items()}

    return StepTime(
        all_of(small.forward, large.forward),
        all_of(small.backward, large.backward),
        whole(small.update, large.update),
    )


def _with_more(one: StagePlan, microbatches: int, size: int) -> StagePlan:
    """`one` with this many microbatches more in flight, of `size` bytes each."""
    peaks = dict(one.peaks)
    for place, peak in one.peaks.items():
        if place[0] in ("forward", "backward"):
            peaks[place] = peak.with_more("activations", microbatches * size)
    return replace(one, peaks=peaks)


def _with_state(one: StagePlan, whole: StagePlan) -> StagePlan:
    """`one` with the bytes of the rank that holds all layers."""
    more = sum(whole.state.values()) - sum(one.state.values())
    peaks = {place: peak.with_more("state", more) for place, peak in one.peaks.items()}
    same = {name: getattr(whole, name) for name in ("state", "host", "checkpoint", "buckets")}
    return replace(one, peaks=peaks, **same)


def _with_update(one: StagePlan, update: StagePlan) -> StagePlan:
    """`one`, traced without the optimizer's part of a step, with this part, traced alone."""
    one = _with_more(one, 1, update.kept)
    peaks, flops = dict(one.peaks), Counter(one.flops)
    for place, peak in update.peaks.items():
        peaks[place] = max(peak, one.peaks.get(place, peak), key=lambda peak: peak.size)
    flops.update(update.flops)
    times = _each(one.times, update.times, lambda a, b: replace(a, update=a.update + b.update))
    return replace(
        one, peaks=peaks, flops=dict(flops), times=times, collectives=one.collectives + update.collectives
    )


def _of_other_sizes(
    traced: StagePlan, fixed: Mapping[Any, int]
) -> dict[tuple[str, str, bool], tuple[int, int]]:
    """Calls and their bytes by axis and kind, of those that are not in `fixed`."""
    found: dict[tuple[str, str, bool], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for key, number in traced.collectives.items():
        if key not in fixed:
            axis, kind, size, hidden = key
            calls, total = found[axis, kind, hidden]
            found[axis, kind, hidden] = calls + number, total + number * size
    return found
