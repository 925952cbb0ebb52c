"""Cards that a plan can be made for: TOML files in `cards/`, or one of the user's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeAlias

from annotated_types import Ge
from pydantic import Field, Strict, ValidationError

from forge.config.keys import read_toml
from forge.config.section import NonNegativeNumber, Positive, PositiveNumber, Section
from forge.observe.hardware import GIB, card_peak_flops
from forge.runtime.errors import UserError, did_you_mean

FOLDER = Path(__file__).parent / "cards"

# TOML has lists, not tuples.
Curve: TypeAlias = list[Annotated[tuple[PositiveNumber, PositiveNumber], Strict(False)]]
"""(size, rate), by increasing size. Between two the rate is taken along a straight line over the logarithm of the size."""


class Link(Section):
    """How cards are connected."""

    gb_per_s: PositiveNumber
    """Bandwidth in one direction, in 10^9 bytes per second: inside of a node of one card, between nodes of one NIC."""
    latency_us: NonNegativeNumber
    """Time of a collective without bytes and hops, in microseconds."""
    hop_us: NonNegativeNumber = 0.0
    """Time of each hop of a ring: from rank to rank inside of a node, or from node to node."""
    efficiency: PositiveNumber = 1.0
    """Share of the bandwidth that collectives reach."""


class Hardware(Section):
    """A card, and how cards are connected."""

    card: str = ""
    """The name that CUDA reports, under which forge/observe/hardware.py has its peak. Empty: a CPU."""
    memory_gib: PositiveNumber
    """Memory of one card, or of one process on a CPU."""
    reserved_gib: NonNegativeNumber = 2.0
    """What the CUDA context, NCCL, kernels' workspaces and fragmentation take. A guess."""
    memory_gb_per_s: PositiveNumber
    """Memory bandwidth, in 10^9 bytes per second."""
    cards_per_node: Positive
    """Cards that are connected by `node`; to ranks beyond each sends through its NIC, a link of `cluster`."""
    cards_per_nic: Positive = 1
    """Cards that have one NIC in common."""
    node: Link
    cluster: Link
    peak_tflops: dict[str, float] = Field(default_factory=dict)
    """Peak by dtype, for what forge/observe/hardware.py does not know."""
    efficiency: Annotated[PositiveNumber, Ge(0.01)] = 0.69
    """Share of the peak that large matrix products reach. This and the next four were fitted: see docs/planning.md."""
    attention_efficiency: Annotated[PositiveNumber, Ge(0.01)] = 0.44
    """The same of attention."""
    float8_efficiency: Annotated[PositiveNumber, Ge(0.01)] = 0.53
    """The same of matrix products in float8, of their own peak."""
    memory_efficiency: PositiveNumber = 0.81
    """Share of the memory's bandwidth that operators reach."""
    overlap_cost: NonNegativeNumber = 0.5
    """Share of hidden communication's time by which it slows computation down: both need SMs, memory and power."""
    operator_us: NonNegativeNumber = 0.0
    """Time that each operator takes beside its work, in microseconds. 0: launches are hidden, as on a card that has enough
    to do."""
    products: dict[str, Curve] = Field(default_factory=dict)
    """Measured, by dtype: [operations of a matrix product, 10^12 of them per second]. In place of peak and efficiency."""
    attention: dict[str, Curve] = Field(default_factory=dict)
    """The same of attention."""
    elementwise: Curve = Field(default_factory=list)
    """Measured: [bytes that an elementwise operator reads and writes, 10^9 of them per second]. In place of the memory's."""

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)

    @property
    def reserved_bytes(self) -> int:
        return round(self.reserved_gib * GIB)

    def reached(self, kind: str, dtype: str) -> float:
        """Return the share of the peak that operators of a kind of `Work` reach."""
        if kind == "attention":
            return self.attention_efficiency
        return self.float8_efficiency if dtype == "float8" else self.efficiency

    def peak_flops(self, dtype: str) -> float | None:
        """Return the peak for matrix products in `dtype`, in FLOP/s, if it is known."""
        if dtype in self.peak_tflops:
            return self.peak_tflops[dtype] * 1e12
        return card_peak_flops(self.card, dtype)


def rate_at(curve: Sequence[tuple[float, float]], size: float) -> float:
    """Return the rate of a curve at `size`; outside of it that of its nearest end."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (left, slow), (right, fast) in pairwise(curve):
        if size <= right:
            share = math.log(size / left) / math.log(right / left)
            return slow + share * (fast - slow)
    return curve[-1][1]


def card_of(device: str) -> Hardware | None:
    """Return the hardware whose card CUDA reports as `device`; None if there is none."""
    every = (find_hardware(path.stem) for path in sorted(FOLDER.glob("*.toml")))
    return next((one for one in every if one.card and one.card == device), None)


def find_hardware(name: str) -> Hardware:
    """Load the hardware with this name, or from this TOML file. Raises UserError."""
    known = sorted(path.stem for path in FOLDER.glob("*.toml"))
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name.lower()}.toml"
    try:
        return Hardware.model_validate(read_toml(path.read_text("utf-8")))
    except OSError:
        raise UserError(
            f"--hardware {name}: not known; there are {', '.join(known)}, or the path of a TOML file"
            + did_you_mean(name, known)
        ) from None
    except (ValidationError, ValueError) as error:
        first = " ".join(str(error).splitlines()[:3])
        raise UserError(f"--hardware {name}: {path} does not describe hardware: {first}") from error
