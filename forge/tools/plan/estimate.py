"""How long a step takes: a roofline over the operators that were traced, and the links that collectives cross.

An operator takes as long as its operations at the card's peak, or its bytes at the bandwidth of its memory, whichever is
longer. What is guessed where it was not measured by scripts/measure_hardware.py: the share of the peak that is reached
(Hardware.efficiency for products, ATTENTION_SHARE of it for attention, Hardware.memory_efficiency), and that launches cost
nothing; and always, that collectives in the background are hidden as long as there is computation. On a CPU they are not:
the cores that move the bytes are those that compute.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, dataclass, field

from forge.tools.plan.hardware import Hardware, rate_at
from forge.tools.plan.links import cost_of
from forge.tools.plan.trace import Trace
from forge.tools.plan.work import Work

ATTENTION_SHARE = 0.75


@dataclass
class Spent:
    """Seconds of computation, of collectives that it waits for, and of those beside it; and how long the bytes of both kinds
    occupy the rank's NVLink and its NIC, which they have in common."""

    compute: float = 0.0
    waiting: float = 0.0
    background: float = 0.0
    node: float = 0.0
    network: float = 0.0

    @property
    def total(self) -> float:
        return max(self.compute + self.waiting, self.background, self.node, self.network)

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class StepTime:
    """Of one rank. forward, backward: of each microbatch that was traced; update: the rest of the step."""

    forward: dict[int, Spent] = field(default_factory=dict)
    backward: dict[int, Spent] = field(default_factory=dict)
    update: Spent = field(default_factory=Spent)


def time_of(trace: Trace, hardware: Hardware, ranks_of: dict[str, list[int]]) -> StepTime:
    """Return the time of the traced step. ranks_of: the ranks of each process group, by its name."""
    spent: dict[tuple[str, int], Spent] = defaultdict(Spent)
    for (moment, work), number in trace.work.items():
        spent[_place(moment.phase, moment.microbatch)].compute += number * seconds_of(work, hardware)
    for moment, call in trace.calls:
        if call.kind in ("send", "recv"):
            continue  # the pipeline's timeline has them
        cost = cost_of(call, ranks_of.get(call.group, []), hardware)
        place = spent[_place(moment.phase, moment.microbatch)]
        place.node += cost.node
        place.network += cost.network
        if hardware.card and call.background and moment.phase in ("forward", "backward"):
            place.background += cost.seconds
        else:
            place.waiting += cost.seconds
    return StepTime(
        {number: found for (phase, number), found in spent.items() if phase == "forward"},
        {number: found for (phase, number), found in spent.items() if phase == "backward"},
        spent["update", 0],
    )


def _place(phase: str, microbatch: int) -> tuple[str, int]:
    return (phase, microbatch) if phase in ("forward", "backward") else ("update", 0)


def seconds_of(work: Work, hardware: Hardware) -> float:
    """Return the time of one operator: the longer of computing and moving its bytes (Williams et al., "Roofline", 2009)."""
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
        peak = hardware.peak_flops(dtype) or hardware.peak_flops("bfloat16") or 1e12
        computed = work.flops / (
            peak * hardware.efficiency * (ATTENTION_SHARE if work.kind == "attention" else 1)
        )
    return hardware.operator_us * 1e-6 + max(moved, computed)
