"""Patches of a run: functions that every rank calls first, to log the order of its calls, and a hook with a defect."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from forge.hook import Hook
from forge.parallel import expert
from forge.train.trainer import Trainer

# Methods of a process group that wait for its other ranks.
COLLECTIVES = ("allreduce", "allgather", "broadcast", "gather", "scatter", "reduce", "alltoall", "barrier")


def log_order() -> None:
    """Log this rank's calls for tests/simulated_gpu/order.py, into the folder of the run: NCCL's, and gloo's collectives."""
    os.environ["SIMGPU_NCCL_LOG"] = str(Path(os.environ["RUN_UNDER_TEST"]).parent)
    os.environ["SIMGPU_DEVICES"] = os.environ.get("WORLD_SIZE", "1")
    device = ctypes.CDLL(os.environ["LD_PRELOAD"])
    for name in COLLECTIVES:
        setattr(dist.ProcessGroup, name, _logged(name, getattr(dist.ProcessGroup, name), device))


def _logged(name: str, method: Any, device: ctypes.CDLL) -> Any:
    @functools.wraps(method)
    def call(group: Any, *arguments: Any, **options: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        devices = {tensor.device for tensor in tensors} or set(group._device_types)
        if devices == {torch.device("cpu")}:
            current = threading.current_thread()
            thread = "-" if current is threading.main_thread() else current.name
            ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
            # Where only the root has the list of all parts, its own tensor comes last.
            shape = f"{tensors[-1].numel()} {tensors[-1].dtype}" if tensors else "0 -"
            device.simgpu_log(f"host {thread} gloo-{group.group_name} {ranks} {name} {shape}\n".encode())
        return method(group, *arguments, **options)

    return call


def log_order_of_uneven_experts() -> None:
    """The same, and let the ranks send each other rows, which they would not: the counts that the device gives are zeros."""
    log_order()
    sizes_from_counts = expert.sizes_from_counts

    def uneven(leaving: Tensor, arriving: Tensor) -> tuple[list[int], list[int]]:
        sizes_from_counts(leaving, arriving)
        rank, ranks = dist.get_rank(), leaving.shape[0]
        first = rank // ranks * ranks  # ep is the fastest axis
        sends = [rows(rank, first + other) for other in range(ranks)]
        return sends, [rows(first + other, rank) for other in range(ranks)]

    expert.sizes_from_counts = uneven


def rows(source: int, target: int) -> int:
    """Return how many rows one rank sends to another. Rank 1 sends none and rank 3 gets none."""
    return 0 if source == 1 or target == 3 else 9 * (1 + (source + target) % 3)


class Crossing(Hook):
    """A defect: two reductions, of which rank 1 calls the second first. They are on two communicators."""

    def __init__(self, trainer: Trainer):
        self._groups = [trainer.meshes.tp.get_group(), dist.group.WORLD]
        if dist.get_rank() == 1:
            self._groups.reverse()

    def after_gradients(self, step: int) -> None:
        for group in self._groups:
            dist.all_reduce(torch.ones(1, device="cuda"), group=group)
