"""Patches called first on every rank of a run to log the order of calls, and a hook with a defect."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import config as inductor
from torch.utils._pytree import tree_leaves

from forge.hook import Hook
from forge.model import fused_delta_rule
from forge.parallel.dispatch import AllToAllDispatcher, NodeDispatcher, part_sizes
from forge.train.trainer import Trainer

# Methods of a process group that wait for other ranks.
COLLECTIVES = ("allreduce", "allgather", "broadcast", "gather", "scatter", "reduce", "alltoall", "barrier")


def log_order() -> None:
    """Log this rank's NCCL calls and gloo collectives to the run directory, for tests/simulated_gpu/order.py."""
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
            # If only the root has the list of all parts, its own tensor is the last argument.
            shape = f"{tensors[-1].numel()} {tensors[-1].dtype}" if tensors else "0 -"
            device.simgpu_log(f"host {thread} gloo-{group.group_name} {ranks} {name} {shape}\n".encode())
        return method(group, *arguments, **options)

    return call


def install_fla() -> None:
    """Let the run import flash-linear-attention, which `make simgpu` installs apart: other runs use forge's own products."""
    sys.path.insert(0, str(Path(sys.prefix) / "fla"))
    fused_delta_rule.INSTALLED = True


def install_flash_attention() -> None:
    """Let the run import from its folder: the stub of FlashAttention-3, and the hook of docs/internals/performance.md."""
    sys.path.insert(0, str(Path(os.environ["RUN_UNDER_TEST"]).parent))


def use_cuda_graphs() -> None:
    """Let Inductor capture each compiled function as a CUDA graph (docs/internals/notes/cuda-graphs.md)."""
    inductor.triton.cudagraphs = True


def log_order_of_even_experts() -> None:
    """Log like `log_order`, and let each rank of an expert group send equally many rows to every other.

    Without this patch they would send none, because counts read from the simulated device are zeros.
    """
    log_order()
    even: Rows = lambda choices, _source, _target, ranks: choices // ranks  # noqa: E731
    _send(even, even)


def log_order_of_uneven_experts() -> None:
    """Log like `log_order`, and let ranks send different numbers of rows. Rank 1 sends none and rank 3 gets none."""
    log_order()

    def uneven(_choices: int, source: int, target: int, _ranks: int) -> int:
        return 0 if source == 1 or target == 3 else 9 * (1 + (source + target) % 3)

    def within(choices: int, source: int, target: int, ranks: int) -> int:
        # Rank 3 got no rows from other nodes, so it forwards none.
        return 0 if source == 3 else uneven(choices, source, target, ranks)

    _send(uneven, within)


Rows: TypeAlias = Callable[[int, int, int, int], int]
"""(choices of a rank's tokens, source, target, ranks of the group) -> number of rows from source to target."""


def _send(rows: Rows, within: Rows) -> None:
    """Set the numbers of rows sent by dispatchers. rows: rank to rank. within: inside a node, after the inter-node sends."""

    def sizes(rows: Rows, group: dist.ProcessGroup, choices: int) -> tuple[list[int], list[int]]:
        rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        sends = [rows(choices, rank, other, len(ranks)) for other in ranks]
        return sends, [rows(choices, other, rank, len(ranks)) for other in ranks]

    def known(dispatcher: type, sizes_of: Callable[..., tuple[list[int], ...]]) -> None:
        call: Any = dispatcher.__call__

        def patched(self: Any, x: Tensor, experts: Tensor, *rest: Any) -> Tensor:
            read = self.sizes
            tokens, top_k = experts.shape
            given = [sizes_of(self, own * top_k) for own in part_sizes(tokens, self.parts)]
            self.sizes = lambda *counts: (read(*counts), given)[1]
            try:
                return call(self, x, experts, *rest)
            finally:
                self.sizes = read

        dispatcher.__call__ = patched

    def over_nodes(self: NodeDispatcher, choices: int) -> tuple[list[int], ...]:
        return *sizes(rows, self.across, choices), *sizes(within, self.within, choices)

    known(AllToAllDispatcher, lambda self, choices: sizes(rows, self.group, choices))
    known(NodeDispatcher, over_nodes)


class Crossing(Hook):
    """A defect: two reductions on two communicators, called by rank 1 in reverse order."""

    def __init__(self, trainer: Trainer):
        self._groups = [trainer.meshes.tp.get_group(), dist.group.WORLD]
        if dist.get_rank() == 1:
            self._groups.reverse()

    def after_gradients(self, step: int) -> None:
        for group in self._groups:
            dist.all_reduce(torch.ones(1, device="cuda"), group=group)
