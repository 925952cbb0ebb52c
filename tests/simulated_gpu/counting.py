"""Counts of one step on the simulated GPU: launches by kernel, copies, waits with their lines, peak memory."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

from forge.hook import Hook
from forge.train.trainer import Trainer

# Steps 1 and 2 still allocate memory and fill caches.
COUNTED = 3


class Counting(Hook):
    """Count step COUNTED on every rank; write `counts.RANK` to the run directory."""

    def __init__(self, trainer: Trainer):
        self._path = trainer.reporter.directory.root / f"counts.{trainer.reporter.world.rank}"
        self._device = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._waits: list[str] = []
        self._recording = warnings.catch_warnings()

    def before_step(self, step: int) -> None:
        if step == COUNTED:
            self._recording.__enter__()
            warnings.showwarning = self._record  # type: ignore[assignment]
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            torch.cuda.reset_peak_memory_stats()
            self._device.simgpu_reset()

    def after_step(self, step: int) -> None:
        if step == COUNTED:
            torch.cuda.set_sync_debug_mode("default")
            self._recording.__exit__(None, None, None)
            self._device.simgpu_write(str(self._path).encode())
            about = {"waits": self._waits, "peak": torch.cuda.max_memory_allocated()}
            self._path.with_suffix(f"{self._path.suffix}.json").write_text(json.dumps(about))

    def _record(self, message: Any, category: Any, *rest: Any) -> None:
        """On PyTorch's warning of a synchronisation, record the innermost line of forge."""
        if "called a synchronizing" in str(message):
            frames = [frame for frame in traceback.extract_stack() if "/forge/" in frame.filename]
            place = frames[-1]
            self._waits.append(f"{place.filename.rpartition('/forge/')[2]}:{place.name}")


class CountingAtFullSize(Counting):
    """Count a step and exit: the last checkpoint would be many gigabytes of zeros.

    Inductor records the bytes moved by each kernel. Rank 0 exits last, because it serves the store of the rendezvous.
    """

    def __init__(self, trainer: Trainer):
        super().__init__(trainer)
        self._world = trainer.reporter.world
        torch._inductor.config.benchmark_kernel = True

    def after_step(self, step: int) -> None:
        super().after_step(step)
        if step == COUNTED:
            while (
                self._world.rank == 0 and len([*self._path.parent.glob("counts.*.json")]) < self._world.size
            ):
                time.sleep(0.1)
            os._exit(0)


def read(run: Path, rank: int = 0) -> dict[str, Any]:
    """Return the counts of a rank: kernels, copies and waits by name, launches, and the allocator's peak in bytes."""
    lines = [line.split("\t") for line in (run / f"counts.{rank}").read_text().splitlines()]
    calls = {name: int(number) for kind, number, name in lines if kind == "call"}
    mangled = {name: int(number) for kind, number, name in lines if kind == "kernel"}
    kernels: Counter[str] = Counter()
    for name, number in zip(short(list(mangled)), mangled.values(), strict=True):
        kernels[name] += number
    about = json.loads((run / f"counts.{rank}.json").read_text())
    return {
        "launches": sum(kernels.values()),
        "kernels": dict(sorted(kernels.items())),
        "copies": {name: n for name, n in sorted(calls.items()) if name.startswith(("copy", "memset"))},
        "synchronizations": {name: n for name, n in sorted(calls.items()) if name.startswith("synchronize")},
        "waits": dict(sorted(Counter(about["waits"]).items())),
        "peak": about["peak"],
    }


def short(mangled: list[str]) -> list[str]:
    """Return kernel names without namespaces and most template arguments."""
    plain = subprocess.run(
        ["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True
    ).stdout
    return [_short(name) for name in plain.splitlines()]


def _short(name: str) -> str:
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = re.split(r"[<(]", name, maxsplit=1)[0].rpartition("::")[2]
    functor = re.search(
        r"(\w*Functor\w*|\w+_kernel_cuda\w*|direct_copy\w*|\w+_functor\w*)", name[len(head) :]
    )
    return f"{head} {functor[1]}" if functor and functor[1] != head else head
