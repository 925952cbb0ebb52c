"""`plan_stage`: the needs of one rank of a run, from one fake rank."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch.distributed as dist

from forge.config import Config, Degrees
from forge.parallel.pipeline import PipelinedModel
from forge.parallel.step.model import ParallelModel
from forge.tools.plan.collectives import Collective, axes_of
from forge.tools.plan.estimate import PACES, StepTime, time_of
from forge.tools.plan.fake import FakeRank, fake_ranks
from forge.tools.plan.hardware import Hardware
from forge.tools.plan.links import Span
from forge.tools.plan.plannable import plannable
from forge.tools.plan.trace import Moment, Peak, Trace

# A step's first, second and last microbatch differ: the first gathers, the last reduces. All others are like the second.
TRACED = 3
# Every forward comes before the first backward, so live memory grows with each microbatch.
FORWARDS_FIRST = ("GPipe", "LoopedBFS")
# Axes whose groups span several stages; only some of these stages are traced.
OVER_STAGES = ("all", "pp", "pp x data")
STATE = ("parameters", "masters", "gradients", "optimizer", "buckets")


StagePlace: TypeAlias = tuple[str, str]
"""Phase of a step, and the submodule: a layer is "layer 0" counted from the first, or "layer -1" from the last."""


@dataclass(frozen=True)
class StagePlan:
    """The needs of the first rank at position `pp_rank` of the pp axis.

    Other ranks with the same stages need the same, except for rounding.

    state: bytes by kind, as in the run's memory report. peaks: largest live memory at each moment of a step. kept:
    bytes of activations that one microbatch keeps for backward in the first stage. collectives: (axis, kind, bytes
    of one call, whether computation can hide it) -> calls per optimizer step. flops: of one microbatch and of the
    update, by phase and submodule. times: for each of PACES; None without hardware. host: host memory of an
    asynchronous save, in bytes. checkpoint: bytes of the rank's layers in a checkpoint, over all ranks. buckets:
    number of buckets of contiguous buffers; 0 for other engines. spans: the nodes of each axis' ranks, except
    groups over several stages.
    """

    pp_rank: int
    rank: int
    layers: str
    state: dict[str, int]
    peaks: dict[StagePlace, Peak]
    kept: int
    flops: dict[StagePlace, float]
    times: tuple[StepTime, ...] | None
    collectives: Counter[tuple[str, str, int, bool]]
    reserved: int = 0
    host: int = 0
    checkpoint: int = 0
    buckets: int = 0
    spans: dict[str, Span] = field(default_factory=dict)

    @property
    def peak(self) -> Peak:
        return max(self.peaks.values(), key=lambda peak: peak.size)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by kind at the peak; `activations` is the peak without the state."""
        size = self.peak.size
        activations = max(0, size - sum(self.state.values()))
        return self.state | {"activations": activations, "other": self.reserved, "peak": size}

    @property
    def needed(self) -> int:
        return self.peak.size + self.reserved


def plan_stage(
    config: Config,
    degrees: Degrees,
    pp_rank: int,
    hardware: Hardware | None,
    *,
    microbatches: int | None = None,
    load: float = 1.0,
    optimizer: Literal["with", "without", "alone"] = "with",
) -> StagePlan:
    """Trace one step of the first rank at this position of the pp axis, and return the rank's plan.

    microbatches: number to trace; None: enough to represent a step. load: number of tokens that the rank's experts
    receive, relative to an equal load of all experts. optimizer: trace the step with or without the optimizer's
    part, or that part alone. If alone, `kept` is the memory that the part leaves allocated for the next step, e.g.
    random numbers.
    """
    rank, traced = pp_rank * degrees.world // degrees.pp, fewer_microbatches(config, degrees)
    if microbatches is not None:
        traced = replace(degrees, accumulation=microbatches)
    with ExitStack() as stack:
        stack.enter_context(fake_ranks(rank, degrees.world))
        card, with_optimizer = hardware is None or bool(hardware.card), optimizer != "without"
        fake = FakeRank(plannable(config)[0], traced, load, card=card, optimizer=with_optimizer)
        # As in a run, memory is freed with its last reference, not by a later garbage collection.
        gc.disable()
        stack.callback(gc.enable)
        state = {kind: 0 for kind in STATE} | fake.state_bytes()
        # The first step also allocates state that later steps reuse.
        left: list[int] = []
        for microbatches in (traced.accumulation if degrees.pp > 1 else 1, traced.accumulation):
            if optimizer == "alone":
                fake.update(microbatches)
            else:
                fake.step(microbatches)
            left.append(fake.trace.before)
        axes = axes_of(fake.meshes)
        calls = Counter(
            (axes.get(call.group, "?"), call.kind, call.size, hideable(moment, call))
            for moment, call in all_calls(fake.trace.calls, fake.model, traced, degrees)
        )
        times, spans = None, {}
        if hardware is not None:
            groups = {name: dist.get_process_group_ranks(_group(name)) for name in axes}
            times = tuple(time_of(fake.trace, config, hardware, groups, pace) for pace in PACES)
            spans = {axes[name]: Span.of(ranks, hardware) for name, ranks in groups.items()}
        waiting = fake.batch_bytes(degrees.accumulation - traced.accumulation)
        peaks = {
            place: peak.with_more("activations", waiting)
            for place, peak in _by_place(fake.trace, fake.model).items()
        }
        layers = _layers(fake.model, config)
        if config.parallel.cpu_offload and hardware is not None and hardware.card:
            # The device holds gathered and computed tensors; the CPU holds the optimizer's tensors.
            peaks = {place: _on_device(peak, state["buckets"]) for place, peak in peaks.items()}
            state = {kind: 0 for kind in STATE}
        kept = left[1] - left[0] if optimizer == "alone" else fake.trace.kept
    reserved = 0 if hardware is None else hardware.reserved_bytes
    return StagePlan(
        *(pp_rank, rank, layers, state, peaks, kept, _flops(fake.trace), times, calls, reserved),
        *(*fake.saved_bytes(), fake.buckets()),
        {axis: span for axis, span in spans.items() if axis not in OVER_STAGES},
    )


def layer_names(model: ParallelModel) -> list[str]:
    """Return the names of this rank's layers, in order."""
    return [f"layers.{name}" for part in model.parts for name in part.layers]


def _by_place(trace: Trace, model: ParallelModel) -> dict[StagePlace, Peak]:
    names = layer_names(model)
    return {(phase, _place(part, names)): peak for (phase, part), peak in trace.peaks.items()}


def _place(part: str, names: list[str]) -> str:
    if part not in names:
        return part
    index = names.index(part)
    return f"layer {index if 2 * index < len(names) else index - len(names)}"


def _on_device(peak: Peak, buckets: int) -> Peak:
    kinds = dict(peak.kinds)
    away = kinds.pop("state") + kinds.pop("gradients", 0) - buckets
    return Peak(peak.size - away, peak.moment, kinds)


def fewer_microbatches(config: Config, degrees: Degrees) -> Degrees:
    """Return `degrees` with the smallest number of microbatches that represents a step."""
    if degrees.pp == 1:
        return replace(degrees, accumulation=min(TRACED, degrees.accumulation))
    schedule, enough = config.pipeline.schedule, 2 * degrees.pp + 2
    divides = degrees.accumulation // degrees.pp * degrees.pp == degrees.accumulation
    if schedule in FORWARDS_FIRST or schedule.endswith(".csv") or degrees.accumulation <= enough:
        return degrees
    if schedule.startswith("Interleaved"):  # in rounds of pp
        return replace(degrees, accumulation=3 * degrees.pp) if divides else degrees
    return replace(degrees, accumulation=enough)


def hideable(moment: Moment, call: Collective) -> bool:
    """Return whether computation can hide the call: it overlaps with the computation of a microbatch."""
    return call.background and moment.phase in ("forward", "backward")


def all_calls(
    calls: list[tuple[Moment, Collective]], model: ParallelModel, traced: Degrees, degrees: Degrees
) -> Iterator[tuple[Moment, Collective]]:
    """Yield (moment, collective) for every collective of a whole step, from a trace with fewer microbatches.

    An untraced microbatch counts like the microbatch in the middle of the trace. Messages between stages have no
    fixed position among the microbatches; each microbatch needs equally many.
    """
    left_out, middle = degrees.accumulation - traced.accumulation, traced.accumulation // 2
    for moment, call in calls:
        times = 1
        if isinstance(model, PipelinedModel) and call.kind in ("send", "recv"):
            times = 0
        elif moment.microbatch == middle and moment.phase in ("forward", "backward"):
            times += left_out
        yield from [(moment, call)] * times
    if isinstance(model, PipelinedModel):
        messages = [call for _, call in calls if call.kind in ("send", "recv")]
        for call, number in Counter(messages).items():
            assert number * degrees.accumulation % traced.accumulation == 0
            yield from [(Moment("forward"), call)] * (number * degrees.accumulation // traced.accumulation)


def _group(name: str) -> dist.ProcessGroup:
    """Return the process group with this name that has this rank."""
    return next(group for group in dist.distributed_c10d._world.pg_map if group.group_name == name)


def _flops(trace: Trace) -> dict[StagePlace, float]:
    """Return the FLOPs of matrix products and attention by phase and submodule, of a middle microbatch and of the update."""
    flops: dict[StagePlace, float] = defaultdict(float)
    middle = max(moment.microbatch for moment, _ in trace.work) // 2
    for (moment, work), number in trace.work.items():
        if moment.phase not in ("forward", "backward"):
            flops["update", ""] += number * work.flops
        elif moment.microbatch == middle and work.flops:
            inside = "attention" if work.kind == "attention" else "layers"
            part = inside if moment.part.startswith("layers.") else "head"
            flops[moment.phase, part] += number * work.flops
    return dict(flops)


def _layers(model: ParallelModel, config: Config) -> str:
    if isinstance(model, PipelinedModel):
        return "; ".join(str(part.stage) for part in model.stages.values())
    return f"all {config.model.n_layers} layers"
