"""Kernel time of a step in matrix products, in attention and in other kernels, by kernel names in the profiler's trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import synchronize

# GPU kernels of cuBLAS (gemm, gemv, splitK, nvjet), CUTLASS, Triton templates and PyTorch's float8; CPU operators.
_PRODUCT = re.compile(
    r"gemm|gemv|nvjet|splitk|cutlass|cublas|triton_(?:tem|mm)|scaled_mm|(?:aten|mkldnn)::_?(?:add|b|badd)?mm|"
    r"aten::mkldnn_|aten::dot\b|aten::mv\b",
    re.IGNORECASE,
)
# Flash, memory-efficient and cuDNN attention, and flex attention's templates. Matched before _PRODUCT, because some of
# these kernels are CUTLASS's.
_ATTENTION = re.compile(r"flash|fmha|attention|sdpa|flex_|pytorch_.*scaled_dot", re.IGNORECASE)


def kind_of(name: str) -> str:
    """Return "attention", "products" or "other" for the name of a kernel or operator."""
    if _ATTENTION.search(name):
        return "attention"
    return "products" if _PRODUCT.search(name) else "other"


def shares(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the share of the summed time by kind, from (name, time). The shares add up to 1."""
    totals = {"products": 0.0, "attention": 0.0, "other": 0.0}
    for name, seconds in times:
        totals[kind_of(name)] += seconds
    whole = sum(totals.values()) or 1.0
    return {kind: total / whole for kind, total in totals.items()}


def largest_other(times: Iterable[tuple[str, float]], count: int = 8) -> list[tuple[str, float]]:
    """Return (name, share of all time) for the `count` slowest kernels outside products and attention."""
    times = list(times)
    whole = sum(seconds for _, seconds in times) or 1.0
    others = [(name[:120], seconds / whole) for name, seconds in times if kind_of(name) == "other"]
    return sorted(others, key=lambda pair: -pair[1])[:count]


def times_of(action: Callable[[], Any], device: torch.device) -> tuple[list[tuple[str, float]], int]:
    """Call `action`. Return (name, microseconds) of each kind of kernel, and the number of launched kernels.

    On a CPU, an operator counts as a kernel, without the operators that it calls.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        # Record only kernels, because recording operators would slow the host down.
        activities = [ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        action()
        synchronize(device)
    events: list[FunctionEvent] = profiler.key_averages()  # type: ignore[assignment]
    if device.type == "cuda":
        events = [event for event in events if event.self_device_time_total > 0]
        times = [(event.key, event.self_device_time_total) for event in events]
    else:
        times = [(event.key, event.self_cpu_time_total) for event in events]
    return times, sum(event.count for event in events)
