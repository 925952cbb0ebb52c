"""GPUs known to the planner, described in TOML files: those of `cards/`, or a file of the user."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeAlias

from annotated_types import Ge, MinLen
from pydantic import Field, Strict, ValidationError

from forge.config.keys import read_toml
from forge.config.section import NonNegativeNumber, Positive, PositiveNumber, Section
from forge.observe.hardware import GIB, card_peak_flops
from forge.runtime.errors import UserError, did_you_mean, unreadable

FOLDER = Path(__file__).parent / "cards"

# TOML has lists, not tuples.
RateCurve: TypeAlias = list[Annotated[tuple[PositiveNumber, PositiveNumber], Strict(False)]]
"""Points (size, rate) by increasing size. Rates between points are interpolated linearly over the logarithm of the size."""


class Link(Section):
    """A connection between GPUs."""

    gb_per_s: PositiveNumber
    """Bandwidth in one direction, in 10^9 bytes per second. In `node`: of one GPU. In `cluster`: of one NIC."""
    latency_us: NonNegativeNumber
    """Fixed time of a collective, in microseconds, besides its hops and bytes."""
    hop_us: NonNegativeNumber = 0.0
    """Time of each hop of a ring, in microseconds. In `node`: from rank to rank. In `cluster`: from node to node."""
    efficiency: PositiveNumber = 1.0
    """Share of the bandwidth reached by collectives."""


class Hardware(Section):
    """A GPU, and the connections between GPUs."""

    card: str = ""
    """The GPU's name as reported by CUDA; forge/observe/hardware.py has its peak. Empty: a CPU."""
    memory_gib: PositiveNumber
    """Memory of one GPU, or of one process on a CPU."""
    reserved_gib: NonNegativeNumber = 2.0
    """Memory of the CUDA context, NCCL, kernels' workspaces and fragmentation. A guess."""
    memory_gb_per_s: PositiveNumber
    """Memory bandwidth, in 10^9 bytes per second."""
    host_gb_per_s: PositiveNumber = 64
    """Bandwidth between host memory and one GPU, in each direction, in 10^9 bytes per second.

    The default is the nominal bandwidth of PCIe 5.0 x16, 32 GT/s per lane. PCIe 4.0 has half.
    """
    host_memory_gib: NonNegativeNumber = 0
    """Host memory of one node. 0: unknown, so a plan compares no host memory with it."""
    cards_per_node: Positive
    """GPUs of one node. `node` is the link between GPUs of a node, `cluster` the link between NICs of different nodes."""
    cards_per_nic: Positive = 1
    """GPUs sharing one NIC."""
    node: Link
    cluster: Link
    peak_tflops: dict[str, PositiveNumber] = Field(default_factory=dict)
    """Peak by dtype, in 10^12 FLOP/s. Needed for dtypes missing in forge/observe/hardware.py."""
    efficiency: Annotated[PositiveNumber, Ge(0.01)] = 0.69
    """Share of the peak reached by large matrix products.

    docs/internals/plan-accuracy.md describes the fit of this value and the next four.
    """
    attention_efficiency: Annotated[PositiveNumber, Ge(0.01)] = 0.44
    """Share of the peak reached by attention."""
    float8_efficiency: Annotated[PositiveNumber, Ge(0.01)] = 0.53
    """Share of the float8 peak reached by matrix products in float8."""
    memory_efficiency: PositiveNumber = 0.81
    """Share of the memory bandwidth reached by operators."""
    overlap_cost: NonNegativeNumber = 0.5
    """Slowdown of computation by overlapped communication, as a share of the communication's time.

    Computation and communication share SMs, memory bandwidth and power.
    """
    operator_us: NonNegativeNumber = 0.0
    """Launch overhead of each operator, in microseconds. 0: launches are hidden, as on a GPU with enough work."""
    products: dict[str, Annotated[RateCurve, MinLen(1)]] = Field(default_factory=dict)
    """Measured rates of matrix products, by dtype: [FLOPs, 10^12 FLOP/s]. Replaces the peak and its efficiency."""
    attention: dict[str, Annotated[RateCurve, MinLen(1)]] = Field(default_factory=dict)
    """Measured rates of attention, by dtype: [FLOPs, 10^12 FLOP/s]. Replaces the peak and its efficiency."""
    elementwise: RateCurve = Field(default_factory=list)
    """Measured rates of elementwise operators: [bytes read and written, 10^9 bytes/s]. Replaces the memory bandwidth."""

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)

    @property
    def reserved_bytes(self) -> int:
        return round(self.reserved_gib * GIB)

    @property
    def host_memory_bytes(self) -> int:
        return round(self.host_memory_gib * GIB)

    def reached(self, kind: str, dtype: str) -> float:
        """Return the fraction of the peak FLOP/s that operators of this kind achieve in `dtype`. kind: see `Work.kind`."""
        if kind == "attention":
            return self.attention_efficiency
        return self.float8_efficiency if dtype == "float8" else self.efficiency

    def peak_flops(self, dtype: str) -> float | None:
        """Return the peak of matrix products in `dtype`, in FLOP/s. None: unknown."""
        if dtype in self.peak_tflops:
            return self.peak_tflops[dtype] * 1e12
        return card_peak_flops(self.card, dtype)


def rate_at(curve: Sequence[tuple[float, float]], size: float) -> float:
    """Interpolate a curve of (size, rate) points at `size`. Beyond either end, return the rate at that end."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (left, slow), (right, fast) in pairwise(curve):
        if size <= right:
            share = math.log(size / left) / math.log(right / left)
            return slow + share * (fast - slow)
    return curve[-1][1]


def card_of(device: str) -> Hardware | None:
    """Return the hardware of the GPU with the CUDA name `device`; None if no file in `cards/` describes it."""
    every = (find_hardware(path.stem) for path in sorted(FOLDER.glob("*.toml")))
    return next((one for one in every if one.card and one.card == device), None)


def find_hardware(name: str) -> Hardware:
    """Load hardware by its name in `cards/`, or from a TOML file if `name` ends in `.toml`. Raises UserError."""
    known = sorted(path.stem for path in FOLDER.glob("*.toml"))
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name.lower()}.toml"
    try:
        return Hardware.model_validate(read_toml(path.read_text("utf-8-sig")))
    except OSError as error:
        if name.endswith(".toml") and not isinstance(error, FileNotFoundError):
            raise unreadable(f"--hardware {name}", error) from None
        why = "no such file" if name.endswith(".toml") else "not known"
        raise UserError(
            f"--hardware {name}: {why}; known: {', '.join(known)}, or the path of a TOML file"
            + did_you_mean(name, known)
        ) from None
    except (ValidationError, ValueError) as error:
        first = " ".join(str(error).splitlines()[:3])
        raise UserError(f"--hardware {name}: {path} does not describe hardware: {first}") from error
