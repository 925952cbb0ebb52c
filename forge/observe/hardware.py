"""GPU peak throughput, memory in use, the age of a process, and library versions."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from pathlib import Path

import torch

from forge.runtime import compat

GIB = 1024**3

# Dense peak in TFLOP/s by the exact name reported by CUDA: bfloat16 with float32 accumulation, TF32, float32 without
# tensor cores, float64, and float8 with float32 accumulation. Source: the vendor's data sheet of each GPU (NVIDIA's
# architecture white paper for GeForce and RTX). Figures given only "with sparsity" are halved. None: not in the sheet,
# or the GPU (before Ada) has no float8. The peak of a GPU with another name, e.g. an OEM variant with other clocks,
# counts as unknown, because a wrong MFU is worse than none.
_PEAK_TFLOPS: dict[str, tuple[float, float, float, float | None, float | None]] = {
    "NVIDIA GB200": (2500, 1250, 80, 40, 5000),
    "NVIDIA B200": (2250, 1100, 75, 37, 4500),
    "NVIDIA H200": (989.5, 494.5, 67, 67, 1979),
    "NVIDIA H200 NVL": (835.5, 417.5, 60, 60, 1670.5),
    "NVIDIA GH200 480GB": (989.5, 494.5, 67, 67, 1979),
    "NVIDIA H100 80GB HBM3": (989.5, 494.5, 67, 67, 1979),
    "NVIDIA H100 NVL": (835.5, 417.5, 60, 60, 1670.5),
    "NVIDIA H100 PCIe": (756.5, 378, 51, 51, 1513),
    "NVIDIA A100-SXM4-80GB": (312, 156, 19.5, 19.5, None),
    "NVIDIA A100-SXM4-40GB": (312, 156, 19.5, 19.5, None),
    "NVIDIA A100 80GB PCIe": (312, 156, 19.5, 19.5, None),
    "NVIDIA A100-PCIE-40GB": (312, 156, 19.5, 19.5, None),
    "NVIDIA A30": (165, 82, 10.3, 10.3, None),
    "NVIDIA A40": (149.7, 74.8, 37.4, None, None),
    "NVIDIA A10": (125, 62.5, 31.2, None, None),
    "NVIDIA L40S": (362.05, 183, 91.6, None, 733),
    "NVIDIA L40": (181.05, 90.5, 90.5, None, 362),
    "NVIDIA L4": (121, 60, 30.3, None, 242.5),
    "NVIDIA RTX 6000 Ada Generation": (364.2, 182.1, 91.1, None, None),
    "NVIDIA RTX A6000": (154.8, 77.4, 38.7, None, None),
    "NVIDIA GeForce RTX 5090": (209.5, 104.8, 104.8, None, None),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6, 82.6, None, None),
    "NVIDIA GeForce RTX 3090": (71, 35.6, 35.6, None, None),
}


def peak_flops(device: torch.device, dtype: torch.dtype | str) -> float | None:
    """Return the dense peak of `device` for matrix products in `dtype`, in FLOP/s; None if unknown.

    dtype: a torch dtype or its name, or `float8` for any float8 format. float32 means TF32 if torch uses TF32 for float32
    products.
    """
    return card_peak_flops(torch.cuda.get_device_name(device) if device.type == "cuda" else "", dtype)


def card_peak_flops(card: str, dtype: torch.dtype | str) -> float | None:
    """Return `peak_flops` of the GPU with CUDA's name `card`."""
    bfloat16, tf32, float32, float64, float8 = _PEAK_TFLOPS.get(card, (None,) * 5)
    tflops = {
        "float8": float8,
        "bfloat16": bfloat16,
        "float32": float32 if torch.get_float32_matmul_precision() == "highest" else tf32,
        "float64": float64,
    }.get(str(dtype).removeprefix("torch."))
    return None if tflops is None else tflops * 1e12


def environment(device: torch.device) -> dict[str, str]:
    """Return the run's software and hardware: library versions, operating system and GPU."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({os.cpu_count()} cores)"
    cuda = {"cuda": str(torch.version.cuda)} if device.type == "cuda" else {}
    return {**compat.versions(), **cuda, "system": platform.platform(), "device": card}


def memory_gib(device: torch.device) -> float:
    """Return the peak memory in GiB: on CUDA the allocator's reserved memory, otherwise the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    return most_resident() / GIB


def most_resident() -> int:
    """Return the peak resident memory of this process, in bytes."""
    # ru_maxrss is in KiB, but on macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def process_age_s(pid: int | None = None) -> float:
    """Return the age in seconds of process `pid` (None: this process), including its imports. Return 0 without /proc."""
    try:
        # Fields of proc(5): the 22nd is the start in clock ticks since boot; the second may contain spaces and
        # brackets.
        ticks = int(Path(f"/proc/{pid or os.getpid()}/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return 0.0
    return max(0.0, age)
