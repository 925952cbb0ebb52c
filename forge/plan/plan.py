"""`make_plan`: what each stage of a run needs, from one fake rank of each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from forge.config import Config, Degrees, check_world
from forge.errors import UserError
from forge.parallel.model import ParallelModel
from forge.parallel.pipeline import PipelinedModel, plan_pipeline
from forge.plan.attention import as_on_cards
from forge.plan.collectives import Collective, axes_of
from forge.plan.estimate import StepTime, time_of
from forge.plan.fake import FakeRank, fake_ranks
from forge.plan.hardware import Hardware
from forge.plan.speed import Speed, speed_of
from forge.plan.trace import Moment, Trace

# A step's first, second and last microbatch differ: the first gathers, the last reduces. All others are like the second.
TRACED = 3
# Every forward comes before the first backward, so what lives grows with each microbatch.
FORWARDS_FIRST = ("GPipe", "LoopedBFS")
STATE = ("parameters", "masters", "gradients", "optimizer", "buckets")


@dataclass(frozen=True)
class StagePlan:
    """The first rank of the pp axis' rank `pp_rank`; the other ranks with its stages hold as much, but for rounding.

    memory: bytes by kind, as the run's memory report counts them; `activations` is the peak without the others. kinds:
    what lived at the peak. kept: bytes of activations that one microbatch leaves to its backward. collectives: calls of one
    optimizer step by (axis, kind, bytes of one call). flops: of one microbatch and of the update. time: None without
    hardware.
    """

    pp_rank: int
    rank: int
    layers: str
    memory: dict[str, int]
    moment: Moment
    kinds: dict[str, int]
    kept: int
    flops: dict[str, float]
    time: StepTime | None
    collectives: Counter[tuple[str, str, int]]

    @property
    def needed(self) -> int:
        return self.memory["peak"] + self.memory["other"]


@dataclass(frozen=True)
class Plan:
    """A configuration on its ranks. `hardware`: None if it is not known."""

    config: Config
    degrees: Degrees
    stages: list[StagePlan]
    hardware: Hardware | None = None
    warnings: list[str] = field(default_factory=list)
    speed: Speed | None = None
    bubble: float = 0.0

    @property
    def worst(self) -> StagePlan:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: stage.needed)

    @property
    def fits(self) -> bool | None:
        """Whether every stage fits the hardware; None if that is not known."""
        return None if self.hardware is None else self.worst.needed <= self.hardware.memory_bytes


def smallest_world(config: Config) -> Degrees:
    """Return the layout on the fewest processes that `config` can run on. Raises UserError if there is no such number."""
    parallel = config.parallel
    unit = parallel.pp * parallel.dp_replicate * parallel.cp * parallel.tp
    sizes = [unit * parallel.dp_shard] if parallel.dp_shard > 0 else range(unit, 1025 * unit, unit)
    first: UserError | None = None
    for world in sizes:
        try:
            return check_world(config, world)
        except UserError as error:
            first = first or error
    assert first is not None
    raise first


def make_plan(config: Config, degrees: Degrees, hardware: Hardware | None = None) -> Plan:
    """Build and trace one rank of each rank of the pp axis. Raises UserError for what cannot be planned."""
    traced, warnings = plannable(config)
    stages = [plan_stage(traced, degrees, pp_rank, hardware) for pp_rank in range(degrees.pp)]
    bubble = plan_pipeline(config, degrees).schedule.bubble if degrees.pp > 1 else 0.0
    speed = None
    if hardware is not None:
        speed = speed_of(traced, degrees, [stage.time or StepTime() for stage in stages], hardware)
        bubble = speed.bubble
    return Plan(config, degrees, stages, hardware, warnings, speed, bubble)


def plannable(config: Config) -> tuple[Config, list[str]]:
    """Return the configuration that is traced, without what fake tensors cannot do, and a line for each difference."""
    changes: dict[str, Any] = {}
    warnings = []
    if config.compile.enabled:
        changes["compile"] = config.compile.model_copy(update={"enabled": False, "loss": False})
        warnings.append(
            "compile.enabled: planned without it; a compiler that fuses operators keeps fewer activations"
        )
    if config.activation_checkpoint.mode == "memory_budget":
        changes["activation_checkpoint"] = config.activation_checkpoint.model_copy(update={"mode": "none"})
        warnings.append(
            "activation_checkpoint.mode = memory_budget: the compiler chooses what it keeps; planned as if it kept all"
        )
    if config.precision.float8 != "none":
        changes["precision"] = config.precision.model_copy(update={"float8": "none"})
        warnings.append("precision.float8: memory and collectives are planned without it")
    if config.model.moe is not None:
        warnings.append("mixture of experts: planned with an equal load for all experts")
    return config.model_copy(update=changes), warnings


def plan_stage(config: Config, degrees: Degrees, pp_rank: int, hardware: Hardware | None) -> StagePlan:
    """Trace one step of the first rank with this rank of the pp axis; `config` from `plannable`."""
    rank, traced = pp_rank * degrees.world // degrees.pp, _fewer_microbatches(config, degrees)
    with ExitStack() as stack:
        stack.enter_context(fake_ranks(rank, degrees.world))
        if hardware is None or hardware.card:
            stack.enter_context(as_on_cards())
        fake = FakeRank(config, traced)
        state = {kind: 0 for kind in STATE} | fake.state_bytes()
        fake.step(
            traced.accumulation if degrees.pp > 1 else 1
        )  # the first one also sets up what later ones use
        fake.step(traced.accumulation)
        peak, axes = fake.trace.peak, axes_of(fake.meshes)
        calls = Counter(
            (axes.get(call.group, "?"), call.kind, call.size)
            for call in all_calls(fake.trace.calls, fake.model, traced, degrees)
        )
        time = None
        if hardware is not None:
            groups = {name: dist.get_process_group_ranks(_group(name)) for name in axes}
            time = time_of(fake.trace, hardware, groups)
        size, kinds = peak.size, dict(peak.kinds)
        layers = _layers(fake.model, config)
        if config.parallel.cpu_offload and hardware is not None and hardware.card:
            # The device has what is gathered and computed; the CPU has what the optimizer works on.
            size -= kinds.pop("state") + kinds.pop("gradients", 0) - state["buckets"]
            state = {kind: 0 for kind in STATE}
    other = 0 if hardware is None else hardware.reserved_bytes
    memory = state | {"activations": max(0, size - sum(state.values())), "other": other, "peak": size}
    return StagePlan(
        pp_rank, rank, layers, memory, peak.moment, kinds, fake.trace.kept, _flops(fake.trace), time, calls
    )


def _fewer_microbatches(config: Config, degrees: Degrees) -> Degrees:
    """Return `degrees` with as many microbatches as show what a step does."""
    if degrees.pp == 1:
        return replace(degrees, accumulation=min(TRACED, degrees.accumulation))
    schedule, enough = config.pipeline.schedule, 2 * degrees.pp + 2
    divides = degrees.accumulation // degrees.pp * degrees.pp == degrees.accumulation
    if schedule in FORWARDS_FIRST or schedule.endswith(".csv") or degrees.accumulation <= enough:
        return degrees
    if schedule.startswith("Interleaved"):  # in rounds of pp
        return replace(degrees, accumulation=3 * degrees.pp) if divides else degrees
    return replace(degrees, accumulation=enough)


def all_calls(
    calls: list[tuple[Moment, Collective]], model: ParallelModel, traced: Degrees, degrees: Degrees
) -> Iterator[Collective]:
    """Yield the collectives of a whole step from those that were traced with fewer microbatches.

    Microbatches that were left out are like one from the middle. Messages between stages have no fixed place among the
    microbatches; each needs as many as any other.
    """
    left_out, middle = degrees.accumulation - traced.accumulation, traced.accumulation // 2
    for moment, call in calls:
        times = 1
        if isinstance(model, PipelinedModel) and call.kind in ("send", "recv"):
            times = 0
        elif moment.microbatch == middle and moment.phase in ("forward", "backward"):
            times += left_out
        yield from [call] * times
    if isinstance(model, PipelinedModel):
        messages = [call for _, call in calls if call.kind in ("send", "recv")]
        for call, number in Counter(messages).items():
            assert number * degrees.accumulation % traced.accumulation == 0
            yield from [call] * (number * degrees.accumulation // traced.accumulation)


def _group(name: str) -> dist.ProcessGroup:
    """The process group of the ranks that exist with this name."""
    return next(group for group in dist.distributed_c10d._world.pg_map if group.group_name == name)


def _flops(trace: Trace) -> dict[str, float]:
    """Operations of matrix products and attention: of one microbatch from the middle, and of the update."""
    flops: dict[str, float] = defaultdict(float)
    middle = max(microbatch for _, microbatch, _ in trace.work) // 2
    for (phase, microbatch, work), number in trace.work.items():
        if phase in ("forward", "backward") and microbatch == middle:
            flops[phase] += number * work.flops
        elif phase not in ("forward", "backward"):
            flops["update"] += number * work.flops
    return dict(flops)


def _layers(model: ParallelModel, config: Config) -> str:
    if isinstance(model, PipelinedModel):
        return "; ".join(str(part.stage) for part in model.stages.values())
    return f"all {config.model.n_layers} layers"
