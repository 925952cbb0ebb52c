"""`plan_stage`: memory, FLOPs, times and collectives of one rank of a run, from a traced step on fake tensors."""

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
from forge.tools.plan.estimate import PACES, StepTime, is_message, time_of
from forge.tools.plan.fake import FakeRank, fake_ranks
from forge.tools.plan.hardware import Hardware
from forge.tools.plan.links import Span
from forge.tools.plan.plannable import plannable
from forge.tools.plan.trace import Moment, Peak, Trace

# The first microbatch of a step gathers parameters, and the last reduces gradients. All others equal the second.
TRACED = 3
# Schedules with all forwards before the first backward. Live memory grows with each microbatch.
FORWARDS_FIRST = ("GPipe", "LoopedBFS")
# Axes whose groups span several stages. A trace of fewer stages has other groups.
OVER_STAGES = ("all", "pp", "pp x data")
STATE = ("parameters", "masters", "gradients", "optimizer", "buckets")


StagePlace: TypeAlias = tuple[str, str]
"""(phase of a step, submodule). A rank's layers are "layer 0", "layer 1", ... and, in the second half, ..., "layer -1"."""


@dataclass(frozen=True)
class StagePlan:
    """Memory, FLOPs, times and collectives of the first rank at position `pp_rank` of the pp axis.

    Other ranks with the same stages have equal values, except for rounding.

    state: bytes by kind, as in the memory report of a run.
    peaks: largest live memory in each phase and submodule of a step.
    kept: bytes of activations kept for backward per microbatch, in the rank's first stage.
    flops: of one microbatch and of the update, by phase and submodule.
    times: one per element of PACES; None without hardware.
    collectives: (axis, kind, bytes of a call, whether computation can hide the call) -> calls per optimizer step.
    reserved: bytes of the CUDA context, NCCL and fragmentation. host: bytes of host memory of a save.
    offloaded: bytes of host memory of activations; 0 without activation offload.
    state_on_host: bytes of parameters, gradients and optimizer state in host memory; 0 without parallel.cpu_offload.
    checkpoint: bytes of this pp rank's tensors in a checkpoint, all shards included.
    buckets: number of buckets of an engine with buffers (ddp, zero1, zero2); 0 for fsdp2.
    spans: axis -> the distribution of its group over nodes. Axes whose groups have several stages are left out.
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
    offloaded: int = 0
    state_on_host: int = 0

    @property
    def peak(self) -> Peak:
        return max(self.peaks.values(), key=lambda peak: peak.size)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by kind at the peak. `activations` is the peak minus the state."""
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
    """Trace a step of the first rank at position `pp_rank` of the pp axis, and return the rank's plan.

    microbatches: number to trace; None: enough to represent a step. load: tokens received by the rank's experts, as a
    multiple of an equal share. optimizer: trace the step "with" the optimizer's update, "without" it, or the update "alone".
    With "alone", `kept` has the bytes that stay allocated after the update, e.g. random numbers.
    """
    rank, traced = pp_rank * degrees.world // degrees.pp, fewer_microbatches(config, degrees)
    if microbatches is not None:
        traced = replace(degrees, accumulation=microbatches)
    with ExitStack() as stack:
        stack.enter_context(fake_ranks(rank, degrees.world))
        card, with_optimizer = hardware is None or bool(hardware.card), optimizer != "without"
        fake = FakeRank(plannable(config)[0], traced, load, card=card, optimizer=with_optimizer)
        # As in a run, reference counting frees memory. The garbage collector must not hide a reference cycle.
        gc.disable()
        stack.callback(gc.enable)
        state = {kind: 0 for kind in STATE} | fake.state_bytes()
        # The first step allocates lasting state. The plan is of the second step.
        left: list[int] = []
        for microbatches in microbatches_of_steps(config, traced):
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
        layers, state_on_host = _layers(fake.model, config), 0
        if config.parallel.cpu_offload and card:
            # The GPU holds only gathered and computed tensors. Shards, gradients and optimizer state are on the CPU.
            peaks = {place: _on_device(peak, state["buckets"]) for place, peak in peaks.items()}
            state_on_host, state = sum(state.values()), {kind: 0 for kind in STATE}
        kept = left[1] - left[0] if optimizer == "alone" else fake.trace.kept
    reserved = 0 if hardware is None else hardware.reserved_bytes
    return StagePlan(
        *(pp_rank, rank, layers, state, peaks, kept, _flops(fake.trace), times, calls, reserved),
        *(*fake.saved_bytes(), fake.buckets()),
        {axis: span for axis, span in spans.items() if axis not in OVER_STAGES},
        *(fake.offloaded_bytes(), state_on_host),
    )


def layer_names(model: ParallelModel) -> list[str]:
    """Return the names of this rank's layers, e.g. "layers.3", in the order of its stages."""
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
    """Return `degrees` with the fewest microbatches whose trace represents a whole step."""
    if degrees.pp == 1:
        return replace(degrees, accumulation=min(TRACED, degrees.accumulation))
    schedule, enough = config.pipeline.schedule, 2 * degrees.pp + 2
    divides = degrees.accumulation // degrees.pp * degrees.pp == degrees.accumulation
    if schedule in FORWARDS_FIRST or schedule.endswith(".csv") or degrees.accumulation <= enough:
        return degrees
    if schedule.startswith("Interleaved"):  # microbatches come in rounds of pp
        return replace(degrees, accumulation=3 * degrees.pp) if divides else degrees
    return replace(degrees, accumulation=enough)


def microbatches_of_steps(config: Config, degrees: Degrees) -> tuple[int, int]:
    """Return the number of microbatches in each of the two traced steps: the fewest that the schedule accepts, then all."""
    schedule = config.pipeline.schedule
    exact = degrees.pp > 1 and (schedule == "DualPipeV" or schedule.endswith(".csv"))
    return degrees.accumulation if exact else 1, degrees.accumulation


def hideable(moment: Moment, call: Collective) -> bool:
    """Return whether computation can hide `call`: it is in forward or backward, and overlaps matrix products or attention."""
    return call.overlaps and moment.phase in ("forward", "backward")


def all_calls(
    calls: list[tuple[Moment, Collective]], model: ParallelModel, traced: Degrees, degrees: Degrees
) -> Iterator[tuple[Moment, Collective]]:
    """Yield (moment, collective) for every collective of a whole step, from a trace with fewer microbatches.

    An untraced microbatch counts like the middle microbatch of the trace. The trace does not say which microbatch a
    message between stages belongs to. The number of these messages is scaled, because every microbatch sends equally
    many.
    """
    left_out, middle = degrees.accumulation - traced.accumulation, traced.accumulation // 2
    messages: Counter[Collective] = Counter()
    for moment, call in calls:
        times = 1
        if isinstance(model, PipelinedModel) and is_message(moment, call):
            times = 0
            messages[call] += 1
        elif moment.microbatch == middle and moment.phase in ("forward", "backward"):
            times += left_out
        yield from [(moment, call)] * times
    for call, number in messages.items():
        assert number * degrees.accumulation % traced.accumulation == 0
        yield from [(Moment("forward"), call)] * (number * degrees.accumulation // traced.accumulation)


def _group(name: str) -> dist.ProcessGroup:
    """Return this rank's process group named `name`."""
    return next(group for group in dist.distributed_c10d._world.pg_map if group.group_name == name)


def _flops(trace: Trace) -> dict[StagePlace, float]:
    """Return the FLOPs of matrix products and attention by (phase, submodule), for the middle microbatch and the update."""
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
