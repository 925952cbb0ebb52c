"""Measure GPUs and links of one or more nodes, with one process per GPU.

Every check also compares its result with the exact value. `node_report.py` compares measured rates with planned ones.
"""

from __future__ import annotations

import csv
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from forge.observe.hardware import GIB
from forge.runtime.compat import all_gather_into, reduce_scatter_into
from forge.runtime.distributed import on_every_rank
from forge.runtime.world import World
from forge.tools.plan.links import TWICE

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
IN_A_NODE, OVER_NODES = "in a node", "over all nodes"
# Largest accepted error of a bfloat16 result (`_error`). Rounding gives 0.005 to 0.01.
TOLERANCE = 0.02
_SMI = ("uuid", "driver_version", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks. n: rows and columns of the square matrices. copied: bytes of the memory copy.

    message: bytes of a collective. least_s: minimum seconds of timing per kernel. calls: timed calls per collective.
    """

    n: int
    heads: int
    seq: int
    head_dim: int
    copied: int
    message: int
    least_s: float
    calls: int


ON_GPU = Sizes(8192, 32, 4096, 128, 1 << 30, 1 << 28, 2.0, 20)
ON_CPU = Sizes(256, 4, 256, 32, 1 << 22, 1 << 20, 0.05, 5)


@dataclass(frozen=True)
class Timed:
    """The result of a check on one rank. seconds: of a call. amount: FLOPs or bytes of a call.

    problem: a sentence about a wrong result; empty if the result is right.
    """

    seconds: float
    amount: float
    problem: str = ""


@dataclass
class RankChecks:
    """The results of one rank: its node, its device according to CUDA and nvidia-smi, and its checks by name."""

    rank: int
    host: str
    gpus: int
    name: str = ""
    memory_gib: float = 0.0
    driver: str = ""
    ecc: str = ""
    uncorrected: str = ""
    timed: dict[str, Timed] = field(default_factory=dict)


def measure_rank(world: World, sizes: Sizes) -> RankChecks:
    """Run all checks. Collective: all ranks measure at the same time.

    If a check raises on any rank, every rank raises RanksFailed.
    """
    device = world.device
    record = describe(world)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernels = {"matrix product": _product, "attention": _attention, "memory": _memory}
    for name, kernel in kernels.items():
        dist.barrier()  # time all GPUs of a node together, because they share power and cooling
        record.timed[name] = on_every_rank(name, partial(kernel, device, dtype, sizes))
    for place, ranks in _groups(world):
        group = None if len(ranks) == world.size else _node_group(world)
        for kind in COLLECTIVES:
            size = sizes.message // len(ranks) * len(ranks)
            run = partial(_collective, kind, size, ranks, group, device, sizes.calls)
            record.timed[f"{kind} {place}"] = on_every_rank(kind, run)
    return record


def describe(world: World) -> RankChecks:
    """Return a RankChecks with this rank's node and device, but without checks."""
    record = RankChecks(world.rank, socket.gethostname(), world.local_size or 1)
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        record.name, record.memory_gib = properties.name, properties.total_memory / GIB
        facts = _nvidia_smi().get(str(properties.uuid), {})
        record.driver, record.ecc, record.uncorrected = (facts.get(key, "") for key in _SMI[1:])
    return record


def median_s(action: Callable[[], object], clock: Callable[[], float], least: float = 0.05) -> float:
    """Return the median seconds of a call of `action`, after two warm-up calls.

    Time at least five calls, and continue until their total reaches `least` seconds. clock: returns the time in seconds.
    """
    action()
    action()
    found: list[float] = []
    total = 0.0  # not sum(found): its time grows with the calls of a fast action
    while total < least or len(found) < 5:
        start = clock()
        action()
        found.append(clock() - start)
        total += found[-1]
    return statistics.median(found)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds. On CUDA, each reading synchronises the device first."""
    return _time_on_card if device.type == "cuda" else time.perf_counter


def _time_on_card() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _product(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Timed:
    """Time the product of two square matrices. Check it by a product with one random vector (Freivalds, 1977)."""
    random = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(sizes.n, sizes.n, device=device, dtype=dtype, generator=random) for _ in range(2))
    c = torch.empty_like(a)
    seconds = median_s(lambda: torch.mm(a, b, out=c), clock_of(device), sizes.least_s)
    x = torch.randn(sizes.n, 1, device=device, dtype=torch.float64, generator=random)
    found, exact = c.double() @ x, a.double() @ (b.double() @ x)
    problem = _error(found.T, exact.T)
    return Timed(seconds, 2.0 * sizes.n**3, problem)


def _attention(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Timed:
    """Time causal attention, forward and backward. Check the output of the first head against the softmax formula."""
    shape = (1, sizes.heads, sizes.seq, sizes.head_dim)
    random = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(*shape, device=device, dtype=dtype, generator=random).requires_grad_() for _ in range(3)
    )
    grad = v.detach()

    def both() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)

    seconds = median_s(both, clock_of(device), sizes.least_s)
    with torch.no_grad():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0].float()
        scores = (q[0, 0].float() @ k[0, 0].float().T) * sizes.head_dim**-0.5
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
        exact = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v[0, 0].float()
        problem = _error(out, exact)
    return Timed(seconds, attention_flops(sizes), problem)


def _memory(device: torch.device, _dtype: torch.dtype, sizes: Sizes) -> Timed:
    """Time and check a copy within device memory. The amount counts the bytes read and written."""
    source = torch.arange(sizes.copied // 4, device=device, dtype=torch.int32)
    copy = torch.empty_like(source)
    seconds = median_s(lambda: copy.copy_(source), clock_of(device), sizes.least_s)
    return Timed(seconds, 2.0 * sizes.copied, "" if torch.equal(copy, source) else "the copy differs")


def _error(found: Tensor, exact: Tensor) -> str:
    """Return a sentence if `found` is not finite or differs from `exact` by more than TOLERANCE; otherwise an empty string.

    Both are `[rows, columns]`. The error of an element is divided by the element's exact size plus the root mean square of
    its row. The reason: the first rows of causal attention average few values, so they are much larger than the last rows.
    """
    size = exact.abs() + exact.square().mean(-1, keepdim=True).sqrt()
    error = float(((found - exact).abs() / size).max())
    if not float(size.max()):
        error = float("nan")  # all zeros: the device computed nothing
    # `<=` is False for NaN, so a NaN counts as wrong.
    return "" if error <= TOLERANCE else f"wrong result: the relative error is {error:.3g}, above {TOLERANCE}"


def _collective(
    kind: str, size: int, ranks: list[int], group: dist.ProcessGroup | None, device: torch.device, calls: int
) -> Timed:
    """Time and check a collective of `size` bytes among `ranks`. Collective on `group`.

    For the check, each rank sends a tensor filled with its group rank plus one.
    """
    n, me = len(ranks), dist.get_rank(group) + 1
    total = n * (n + 1) // 2
    whole = torch.full((size // 4,), float(me), device=device)
    part, other = torch.full((size // 4 // n,), float(me), device=device), torch.empty_like(whole)
    senders = torch.arange(1, n + 1, device=device, dtype=torch.float32).repeat_interleave(part.numel())
    run: Callable[[], Any]
    if kind == "all_reduce":
        run, result, expected = (
            partial(dist.all_reduce, whole, group=group),
            whole,
            torch.full_like(whole, total),
        )
    elif kind == "all_gather":
        run, result, expected = lambda: all_gather_into(other, part, group).wait(), other, senders
    elif kind == "reduce_scatter":
        world = group or dist.group.WORLD
        assert world is not None
        run, result = lambda: reduce_scatter_into(part, whole, world).wait(), part
        expected = torch.full_like(part, total)
    else:
        run, result, expected = partial(dist.all_to_all_single, other, whole, group=group), other, senders
    run()
    problem = "" if torch.equal(result, expected) else "wrong result"
    whole.zero_()  # repeated sums of other values would overflow
    clock, found = clock_of(device), []
    for _ in range(calls):  # not a time limit: every rank must make the same number of calls
        start = clock()
        run()
        found.append(clock() - start)
    moved = (2.0 if kind in TWICE else 1.0) * size * (n - 1) / n
    return Timed(statistics.median(found), moved, problem)


def _groups(world: World) -> list[tuple[str, list[int]]]:
    """Return (name, ranks) of the groups to measure: the ranks of this node and, if there are several nodes, all ranks.

    A group of one process is left out.
    """
    per_node = world.local_size or world.size
    first = world.rank - world.local_rank
    node = [(IN_A_NODE, list(range(first, first + per_node)))] if per_node > 1 else []
    return [*node, *([(OVER_NODES, list(range(world.size)))] if world.size > per_node else [])]


def _node_group(world: World) -> dist.ProcessGroup:
    """Return a new process group of this rank's node. Collective over all ranks."""
    starts = range(0, world.size, world.local_size)
    made = [dist.new_group(list(range(start, start + world.local_size))) for start in starts]
    return made[world.rank // world.local_size]


def attention_flops(sizes: Sizes) -> float:
    """Return the FLOPs of causal attention, forward and backward: seven matrix products over half the scores."""
    return 7 * 2.0 * sizes.heads * sizes.head_dim * sizes.seq * (sizes.seq + 1) / 2


def _nvidia_smi() -> dict[str, dict[str, str]]:
    """Query nvidia-smi. Return a dict from GPU UUID, without the prefix `GPU-`, to a dict from field to value.

    Return an empty dict if nvidia-smi cannot run.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return {
        row[0].removeprefix("GPU-"): dict(zip(_SMI, row, strict=True))
        for row in rows
        if len(row) == len(_SMI)
    }
