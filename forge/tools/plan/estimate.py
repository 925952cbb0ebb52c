"""Estimate the time of a step: traced operators by a roofline model, collectives by the bandwidth and latency of links.

An operator takes the longer of two times: its FLOPs at the GPU's peak, and its bytes at the memory bandwidth. The
efficiencies in `Hardware` are the shares of peak and bandwidth that operators reach; docs/internals/plan-accuracy.md names
the published runs used to fit them. A collective hidden by computation lengthens the computation by a share of the
collective's time. FSDP's collectives are hidden by any computation of the microbatch. Other collectives are hidden only by
operators between the call and the wait for its result. On a CPU no collective is hidden, because the same cores move bytes
and compute. The copies of activation offload are hidden up to the duration of all other work of the same phase, forward or
backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import astuple, dataclass, field, replace

from forge.config import Config
from forge.tools.plan.collectives import Collective
from forge.tools.plan.float8 import products_in_float8
from forge.tools.plan.hardware import Hardware, rate_at
from forge.tools.plan.links import cost_of
from forge.tools.plan.trace import Moment, Trace
from forge.tools.plan.work import Work

# Bytes of elementwise operators after fusion by Inductor, divided by the bytes before. For forward and backward of a
# Llama 8B block with 4,096 tokens, Inductor of PyTorch 2.14 counts 2.05 GB instead of 4.63 GB.
FUSED = 0.44


@dataclass(frozen=True)
class Pace:
    """Factors by which planned durations are multiplied. compute: of computation. links: of collectives and copies."""

    compute: float
    links: float


# Fast end, plan and slow end of the planned range. All but two of the published runs used for fitting lie in the range.
PACES = (Pace(0.87, 0.75), Pace(1.0, 1.0), Pace(1.15, 1.4))


@dataclass
class Spent:
    """Seconds by cause. compute: computation. waiting: exposed collectives. background: overlapped collectives.

    node, network: seconds during which collectives, exposed or overlapped, occupy NVLink and the NIC.
    host: seconds during which offloaded activations occupy the link to host memory.
    """

    compute: float = 0.0
    waiting: float = 0.0
    background: float = 0.0
    node: float = 0.0
    network: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return max(self.compute + self.waiting, self.background, self.node, self.network, self.host)

    def with_exposed_copies(self) -> Spent:
        """Return a copy in which `waiting` is at least `host` - `compute`, the part of `host` not hidden by computation."""
        return replace(self, waiting=max(self.waiting, self.host - self.compute))

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class StepTime:
    """Times of one rank's step. forward, backward: traced microbatch -> time. update: the rest of the step."""

    forward: dict[int, Spent] = field(default_factory=dict)
    backward: dict[int, Spent] = field(default_factory=dict)
    update: Spent = field(default_factory=Spent)


def time_of(
    trace: Trace, config: Config, hardware: Hardware, ranks_of: dict[str, list[int]], pace: Pace = PACES[1]
) -> StepTime:
    """Return the time of the traced step.

    config: the run's configuration. The trace runs without compilation and float8 products, so the effects of both are
    estimated. ranks_of: name of a process group -> its ranks.
    """
    spent: dict[tuple[str, int], Spent] = defaultdict(Spent)
    float8 = products_in_float8(config, hardware)
    for (moment, work), number in trace.work.items():
        seconds = seconds_of(_as_run(work, moment, config, float8), hardware)
        spent[_place(moment.phase, moment.microbatch)].compute += number * pace.compute * seconds
    for moment, call in trace.calls:
        if is_message(moment, call):
            continue  # the pipeline's timeline includes messages between stages
        cost = cost_of(call, ranks_of.get(call.group, []), hardware).times(pace.links)
        place = spent[_place(moment.phase, moment.microbatch)]
        place.node += cost.node
        place.network += cost.network
        if hardware.card and call.background and moment.phase in ("forward", "backward"):
            place.background += cost.seconds
        else:
            done = (
                number * seconds_of(_as_run(work, moment, config, float8), hardware)
                for work, number in call.meanwhile
            )
            hidden = min(cost.seconds, pace.compute * sum(done)) if hardware.card else 0.0
            place.waiting += cost.seconds - (1 - hardware.overlap_cost) * hidden
    for moment, size in trace.copied.items():
        copying = pace.links * size / (hardware.host_gb_per_s * 1e9)
        spent[_place(moment.phase, moment.microbatch)].host += copying
    for place in spent.values():
        place.waiting += hardware.overlap_cost * min(place.background, place.compute)
    return StepTime(
        {number: found for (phase, number), found in spent.items() if phase == "forward"},
        {number: found for (phase, number), found in spent.items() if phase == "backward"},
        spent["update", 0],
    )


def is_message(moment: Moment, call: Collective) -> bool:
    """Return whether `call` passes activations or their gradients between stages. Tied weights are sent in the update."""
    return call.kind in ("send", "recv") and moment.phase != "update"


def _place(phase: str, microbatch: int) -> tuple[str, int]:
    return (phase, microbatch) if phase in ("forward", "backward") else ("update", 0)


def _as_run(work: Work, moment: Moment, config: Config, float8: Collection[str]) -> Work:
    """Return `work` corrected for compilation and float8. The trace has neither.

    float8: the result of `products_in_float8`.
    """
    in_block = moment.part.startswith("layers.")
    in_loss = moment.part == "head"
    if work.kind == "memory" and ((in_block and config.compile.enabled) or (in_loss and config.compile.loss)):
        return replace(work, size=FUSED * work.size)
    taken = (work.linear and "linear" in float8) or (work.experts and "experts" in float8)
    if in_block and taken and "float32" not in work.dtype:
        # Scaling and rounding the operands doubles the bytes read and written.
        return replace(work, dtype="float8", size=2 * work.size)
    return work


def seconds_of(work: Work, hardware: Hardware) -> float:
    """Return the seconds of one operator: launch overhead, plus the longer of compute time and memory time.

    Roofline model: Williams et al., 2009.
    """
    bandwidth = hardware.memory_gb_per_s * hardware.memory_efficiency
    if hardware.elementwise and not work.flops:
        bandwidth = rate_at(hardware.elementwise, max(work.size, 1))
    moved = work.size / (bandwidth * 1e9)
    if not work.flops:
        return hardware.operator_us * 1e-6 + moved
    dtype = work.dtype.removeprefix("torch.")
    curves = hardware.attention if work.kind == "attention" else hardware.products
    if dtype in curves:
        computed = work.flops / (rate_at(curves[dtype], work.flops) * 1e12)
    else:
        peak = hardware.peak_flops(dtype) or hardware.peak_flops("bfloat16")
        if peak is None and "bfloat16" in curves:  # a measured GPU that forge does not list
            computed = work.flops / (rate_at(curves["bfloat16"], work.flops) * 1e12)
        else:
            computed = work.flops / ((peak or 1e12) * hardware.reached(work.kind, dtype))
    return hardware.operator_us * 1e-6 + max(moved, computed)
