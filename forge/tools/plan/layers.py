"""`plan_stages`: the plans of all pipeline stages, extrapolated from traces of small models.

Two small models of different depth are traced. Their difference is the cost of one layer. Each point of the step has its
own difference, because the full model may peak at another point than the small models. A long pipeline is traced as three
ranks: first, middle and last. A real rank may have more microbatches in flight than its traced counterpart. The memory of
the additional microbatches is then added.

With attention residuals, attention and feed-forward each read a mix of streams: one saved by each earlier residual block,
and the current one. The smaller model is traced twice more, with two residual blocks instead of one. These traces give the
cost of a residual block and the cost of a stream in a mix. Sums over a step, e.g. FLOPs, have both costs. Memory peaks grow
only with the number of residual blocks, because each block saves one stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from forge.config import Config, Degrees
from forge.config.patterns import names_layers
from forge.parallel.build import build_meta_model
from forge.parallel.pipeline import plan_pipeline
from forge.parallel.pipeline.schedule import Action, Schedule
from forge.tools.plan.growth import Growth, whole_plan, with_more, with_state, with_update
from forge.tools.plan.hardware import Hardware
from forge.tools.plan.stage import StagePlan, fewer_microbatches, microbatches_of_steps, plan_stage

# Schedules for which a trace of few ranks and few microbatches represents a longer pipeline.
SHORTENED = ("1F1B", "Interleaved1F1B")
# Results of `kinds_of_layers` by model and sequence length.
_KINDS: dict[str, list[Any]] = {}
# Results of `_optimizer_alone` by rank of the pp axis, for the latest configuration, degrees and hardware.
_ALONE: dict[str, dict[int, StagePlan]] = {}


def plan_stages(
    config: Config, degrees: Degrees, hardware: Hardware | None, *, load: float = 1.0
) -> list[StagePlan]:
    """Return a plan for each rank of the pp axis.

    load: tokens received by a rank's experts, as a multiple of an equal share.
    """
    config = with_experts_first(config, degrees)
    few = few_layers(config, degrees)
    if few is None:
        return [plan_stage(config, degrees, rank, hardware, load=load) for rank in range(degrees.pp)]
    small, large = (_trace(one, config, degrees, hardware, load) for one in few)
    if degrees.pp == 1:
        growths = [_growth(config, few, small[0], large[0])]
        if config.model.residual == "attention":
            early, late = two_blocks(few[0])
            (more,), (less,) = (_trace(one, config, degrees, hardware, load) for one in (early, late))
            growths += _growths_by_streams(config, few, small[0], less, more)
        one = _extrapolate(growths, _names(config), config, degrees, hardware)
        return [replace(one, layers=f"all {config.model.n_layers} layers")]
    return _all_ranks(config, degrees, few, small, large, hardware)


def with_experts_first(config: Config, degrees: Degrees) -> Config:
    """Return `config` with experts also in the first, dense layers, if `few_layers` returns models only for such a config.

    Otherwise, or without a pipeline, return `config` unchanged. The replacement is accurate for models like DeepSeek's:
    their dense layers cost as many FLOPs as their layers with experts.
    """
    moe = config.model.moe
    if degrees.pp == 1 or moe is None or not moe.n_dense_layers or few_layers(config, degrees) is not None:
        return config
    experts = config.model.model_copy(update={"moe": moe.model_copy(update={"n_dense_layers": 0})})
    changed = config.model_copy(update={"model": experts})
    return config if few_layers(changed, degrees) is None else changed


def _names(config: Config) -> list[str]:
    """Return the names of all layers, multi-token prediction modules last."""
    return [f"layers.{index}" for index in range(config.model.n_layers + config.model.mtp_depth)]


@dataclass(frozen=True)
class Few:
    """A small model, traced in place of the whole model.

    layers: total number of layers. per_stage: layers per pipeline stage. ranks: size of the pp axis. microbatches: number
    to trace; None: enough to represent a step. tail: number of last layers copied from the end of the whole model.
    block_size: layers per block of attention residuals; 0: the config's own.
    """

    layers: int
    per_stage: int
    ranks: int = 1
    microbatches: int | None = None
    tail: int = 0
    block_size: int = 0


def few_layers(config: Config, degrees: Degrees) -> tuple[Few, Few] | None:
    """Return the two small models to trace.

    Return None if the layers are too few or too different, or if a pattern names layers by number. The caller then traces
    all layers.
    """
    if names_layers(config):
        return None
    n_layers = config.model.n_layers
    every = kinds_of_layers(config)
    kinds, ahead = every[:n_layers], every[n_layers:]
    if degrees.pp == 1:
        return _few_in_one_stage(config, kinds, ahead)
    plan = plan_pipeline(config, degrees)
    counts, stages = [len(stage.layers) for stage in plan.stages], len(plan.stages)
    # With attention residuals a stage reads one stream per earlier block, so stages differ.
    mixes = config.model.residual == "attention"
    least = _least(config)
    if config.pipeline.schedule not in SHORTENED or len(set(kinds)) > 1 or mixes or min(counts) <= least:
        return None
    ranks, per_rank = min(3, degrees.pp), stages // degrees.pp
    # The first rank runs a forward after a backward, with gradients in memory, only if there are more microbatches than
    # ranks. Interleaved stages have all microbatches in flight only after a round of all ranks.
    plain = max(3, ranks + (degrees.accumulation > degrees.pp))
    microbatches = 2 * ranks if per_rank > 1 else plain
    if degrees.accumulation < microbatches:
        return None
    return (
        Few(least * ranks * per_rank, least, ranks, microbatches),
        Few((least + 1) * ranks * per_rank, least + 1, ranks, microbatches),
    )


def _least(config: Config) -> int:
    """Return how often the smaller model repeats the period of layers.

    Usually twice. With activation offload three times, because up to three layers are in memory during backward of a layer.
    """
    return 3 if config.activation_checkpoint.mode == "offload" else 2


def traced_layers(config: Config, degrees: Degrees) -> int:
    """Return the number of traced layer forwards (layers times microbatches), a measure of the time to make a plan."""
    config = with_experts_first(config, degrees)
    few, fewer = few_layers(config, degrees), fewer_microbatches(config, degrees)
    traced: tuple[Few, ...] = few or (Few(config.model.n_layers, config.model.n_layers),)
    if few is not None and degrees.pp == 1 and config.model.residual == "attention":
        traced = *few, *two_blocks(few[0])
    return sum(
        one.layers * sum(microbatches_of_steps(config, _fewer_microbatches(fewer, one))) for one in traced
    )


def _few_in_one_stage(config: Config, kinds: list[Any], ahead: list[Any]) -> tuple[Few, Few] | None:
    """Return two models with few layers, for a run without a pipeline; None if the kinds of layers do not repeat.

    The larger model has one more period of layers, so the difference of the two plans is the plan of one period.

    kinds, ahead: from `kinds_of_layers`, for the trunk's layers and for the MTP modules.
    """
    n_layers, mixes = len(kinds), config.model.residual == "attention"

    def shown(size: int, tail: int) -> list[Any]:
        smaller = [*kinds[: size - tail], *kinds[n_layers - tail :]]
        return smaller[size // 2 + 2 :]

    def first_size(lead: int, period: int, tail: int) -> int:
        size = lead + (n_layers - lead - tail) % period + _least(config) * period + tail
        if not mixes:
            return size
        # In the third trace, layers of every kind must read two blocks of attention residuals.
        size -= period
        while size < 7 or (size < n_layers and not set(kinds[lead:-1]) <= set(shown(size, tail))):
            size += period
        return size

    # The first `lead` and the last `tail` layers are special. The layers between them repeat with this period.
    found = next(
        (
            (lead, period, tail)
            for period in range(1, n_layers + 1)
            for tail in range(3)
            for lead in range(min(period + 4, n_layers))
            if first_size(lead, period, tail) + period < n_layers
            and kinds[lead : n_layers - tail - period] == kinds[lead + period : n_layers - tail]
        ),
        None,
    )
    if found is None:
        return None
    lead, period, tail = found
    first = first_size(lead, period, tail)
    blocks = first + period if mixes else 0  # one residual block holds all layers
    few = (
        Few(first, first, tail=tail, block_size=blocks),
        Few(first + period, first + period, tail=tail, block_size=blocks),
    )
    last = kinds[n_layers - tail :] if tail else []
    same = all(
        kinds_of_layers(_smaller(config, one)) == [*kinds[: one.layers - tail], *last, *ahead] for one in few
    )
    return few if same else None


def kinds_of_layers(config: Config) -> list[Any]:
    """Return an integer for each layer and MTP module.

    Two layers have the same integer if their modules, shapes and settings are equal and activation checkpointing applies to
    both or to neither.
    """
    every = config.activation_checkpoint.every
    key = f"{config.model.model_dump_json()} {config.train.seq_len} {every}"
    if key not in _KINDS:  # a search asks for the same kinds with each of hundreds of layouts
        kinds: dict[str, int] = {}
        layers = build_meta_model(config).layers.values()
        _KINDS[key] = [
            kinds.setdefault(f"{index % every == 0} {_describe(layer, index)}", len(kinds))
            for index, layer in enumerate(layers)
        ]
    return _KINDS[key]


def _describe(layer: nn.Module, index: int) -> str:
    modules = [
        (name, type(module).__qualname__, sorted(_settings(module, index)))
        for name, module in layer.named_modules()
    ]
    return str((modules, [(name, *values.shape) for name, values in layer.named_parameters()]))


def _settings(module: nn.Module, index: int) -> list[tuple[str, str]]:
    """Return (name, value) of the module's attributes that are numbers or strings, except its own position `index`."""
    return [
        (name, str(value))
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
        and not (name in ("layer", "index") and value == index)
        and name != "begins_block"
    ]


def _smaller(config: Config, few: Few) -> Config:
    model: dict[str, Any] = {"n_layers": few.layers}
    if few.tail:
        layers = [
            *range(few.layers - few.tail),
            *range(config.model.n_layers - few.tail, config.model.n_layers),
        ]
        model["layer_pattern"] = tuple(config.model.kind_of(layer) for layer in layers)
    if few.block_size:
        model["residual_block_size"] = few.block_size
    update: dict[str, Any] = {"model": config.model.model_copy(update=model)}
    if few.ranks > 1:
        update["parallel"] = config.parallel.model_copy(update={"pp": few.ranks})
        update["pipeline"] = config.pipeline.model_copy(update={"layers_per_stage": few.per_stage})
    return config.model_copy(update=update)


def _fewer_ranks(degrees: Degrees, few: Few) -> Degrees:
    return replace(degrees, pp=few.ranks, world=degrees.world // degrees.pp * few.ranks)


def _fewer_microbatches(degrees: Degrees, few: Few) -> Degrees:
    return replace(degrees, accumulation=few.microbatches or degrees.accumulation)


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
    """Return whether the optimizer assigns whole tensors to ranks. A rank's work is then not linear in its layers.

    A user's optimizer may do so, so return True for it.
    """
    optimizer = config.optimizer
    shares = optimizer.name == "muon" or ":" in optimizer.name or optimizer.moment_dtype == "int8"
    return degrees.world > degrees.pp and shares


def _all_ranks(
    config: Config,
    degrees: Degrees,
    few: tuple[Few, Few],
    small: list[StagePlan],
    large: list[StagePlan],
    hardware: Hardware | None,
) -> list[StagePlan]:
    plan = plan_pipeline(config, degrees)
    fewer = _fewer_microbatches(_fewer_ranks(degrees, few[0]), few[0])
    traced = plan_pipeline(_smaller(config, few[0]), fewer).schedule
    stages = []
    # All layers are of one kind, so the optimizer's part is equal on ranks with stages of equal sizes.
    equal_ranks: dict[Any, int] = {}
    for rank in range(degrees.pp):
        own = plan.of_rank(rank)
        first_equal = equal_ranks.setdefault(
            tuple((len(one.layers), one.embed, one.head) for one in own), rank
        )
        names = [f"layers.{index}" for stage in own for index in stage.layers]
        role = 0 if rank == 0 else few[0].ranks - 1 if rank == degrees.pp - 1 else 1
        step = few[1].per_stage - few[0].per_stage
        steps = (len(names) / len(own) - few[1].per_stage) / step
        if any(stage.head for stage in own):
            names += _names(config)[config.model.n_layers :]
        first_rank = rank * degrees.world // degrees.pp
        growth = Growth(small[role], large[role], steps, steps, steps)
        one = _extrapolate([growth], names, config, degrees, hardware, first_equal)
        flying, of_traced = in_flight(plan.schedule, rank), in_flight(traced, role)
        one = replace(one, offloaded=one.offloaded * flying // of_traced)
        # Each further microbatch is in flight in the rank's first stage, and also keeps the message of the previous stage.
        # Tied weights are received only once.
        sizes = [
            0 if own[0].embed else size
            for (_, kind, size, _), number in one.collectives.items()
            if kind == "recv" and number >= degrees.accumulation
        ]
        one = with_more(one, flying - of_traced, one.kept + max(sizes, default=0))
        stages.append(replace(one, pp_rank=rank, rank=first_rank, layers="; ".join(map(str, own))))
    return stages


def _growth(config: Config, few: tuple[Few, Few], small: StagePlan, large: StagePlan) -> Growth:
    steps = (config.model.n_layers - few[1].layers) / (few[1].layers - few[0].layers)
    return Growth(small, large, steps, steps, steps)


def two_blocks(few: Few) -> tuple[Few, Few]:
    """Return two versions of the small model `few`, both with two blocks of attention residuals.

    The second block has almost half of the layers in the first version, and two layers in the second version.
    """
    return replace(few, block_size=few.layers // 2 + 1), replace(few, block_size=few.layers - 2)


def _growths_by_streams(
    config: Config, few: tuple[Few, Few], small: StagePlan, less: StagePlan, more: StagePlan
) -> list[Growth]:
    """Return the Growth of a residual block, and the Growth of a residual stream read by a mix.

    The caller adds both to the Growth of a layer (`_growth`), which is traced with one residual block.

    more, less: plans of the two models of `two_blocks`. The second block of `more` is longer, so its mixes read more
    streams.
    """
    model, steps = config.model, _growth(config, few, small, small).steps
    read, read_by_larger = (streams_read(one.layers, one.block_size) for one in few)
    early, late = (streams_read(one.layers, one.block_size) for one in two_blocks(few[0]))
    blocks = -(-model.n_layers // model.residual_block_size) - 1
    whole = streams_read(model.n_layers, model.residual_block_size)
    missing = whole - read_by_larger - steps * (read_by_larger - read) - blocks * (late - read)
    reads = missing / (early - late)
    # A mix keeps two numbers per stream read, unless activation checkpointing recomputes its block.
    of_kept = reads if config.activation_checkpoint.mode == "none" else blocks
    return [Growth(small, less, blocks, blocks, blocks), Growth(less, more, reads, blocks, of_kept)]


def streams_read(n_layers: int, block_size: int) -> int:
    """Return the number of streams read by all mixes of attention residuals in one forward."""
    saved = [-(-layer // block_size) for layer in range(n_layers + 1)]
    attention = sum(number + 1 for number in saved[1:n_layers])
    feed_forward = sum(number + 1 for number in saved[1:])
    return attention + feed_forward + saved[n_layers] + 1


def in_flight(schedule: Schedule, rank: int) -> int:
    """Return the largest number of forwards on `rank` that wait for their backward at the same time."""
    number = most = 0
    for action in schedule.order[rank]:
        number += _opens(action)
        most = max(most, number)
    return most


def _opens(action: Action) -> int:
    return {"F": 1, "B": -1}[action.kind]


def _extrapolate(
    growths: list[Growth],
    names: list[str],
    config: Config,
    degrees: Degrees,
    hardware: Hardware | None,
    pp_rank: int = 0,
) -> StagePlan:
    """Return the plan of a rank with layers `names`, from the `growths` of small models.

    If the optimizer's work is not linear in the number of layers, the update is traced with all layers of the rank.
    """
    apart = _shares_work(config, degrees)
    if not growths[0].large.buckets and not apart:
        return whole_plan(growths, names)
    # Neither the divided optimizer work nor the number of buckets is proportional to the number of layers.
    whole = _optimizer_alone(config, degrees, hardware, pp_rank)
    one = with_state(whole_plan(growths, names, whole.buckets or None), whole)
    return with_update(one, whole) if apart else one


def _optimizer_alone(config: Config, degrees: Degrees, hardware: Hardware | None, pp_rank: int) -> StagePlan:
    """Return the plan of the optimizer's part of a step, traced with all layers of the rank.

    Results are cached, because `crowded_bytes` asks again for the same plans.
    """
    key = f"{config.model_dump_json()} {degrees} {hardware}"
    if key not in _ALONE:
        _ALONE.clear()
    stages = _ALONE.setdefault(key, {})
    if pp_rank not in stages:
        stages[pp_rank] = plan_stage(config, degrees, pp_rank, hardware, optimizer="alone")
    return stages[pp_rank]
