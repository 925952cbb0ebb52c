"""`DataParallel`, the interface of data-parallel engines, and the choice of the engine.

`ParallelModel` calls every engine in the same way and order. An engine either gathers parameters unit by unit
(forge/parallel/engines/fsdp.py) or keeps them in contiguous buffers (forge/parallel/engines/buffered).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from forge.model import Transformer
from forge.model.norm import promoted
from forge.parallel.engines.buffered import Buffered
from forge.parallel.engines.fsdp import FullySharded
from forge.parallel.layout import Layout
from forge.shard import Shard


class DataParallel(Protocol):
    """An engine on one model, or on one stage of a model. Every method is collective unless its docstring says otherwise."""

    name: str
    """The engine's name in the log."""
    shards: list[Shard]
    """This rank's shards of the parameters, for the optimizer, in the order of `named_parameters`; available after
    `allocate`.
    """

    copies: dict[Tensor, Tensor]
    """Compute-dtype copies of master parameters: `Shard.parameter` -> the same elements in the model's compute weights.

    Available after `allocate`; empty for an engine without copies.
    """

    def allocate(self, device: torch.device) -> None:
        """Give this rank uninitialised storage for its part of the model."""

    def begin_microbatch(self, *, last: bool) -> None:
        """Prepare for a backward. Call before each forward that has a backward; in a pipeline, just before the backward.

        last: True for the last backward of the optimizer step.
        """

    def take_weight_gradients(self, *, last: bool) -> None:
        """Take over weight gradients that a pipeline schedule computed separately from input gradients.

        Call after each such computation. last: True for the last one of the optimizer step.
        """

    def start_gradient_sync(self) -> None:
        """Launch the remaining reductions over data ranks. Call after the last backward."""

    def finish_gradient_sync(self) -> None:
        """Complete the reductions. Afterwards the gradients of `shards` are sums over data ranks."""

    def after_update(self, copied: Collection[Tensor] = ()) -> None:
        """Make the model use the new values of `shards`. Call after each write to `shards`.

        copied: parameters of `shards` whose compute weights (`copies`) the caller has already written.
        """

    def zero_gradients(self) -> None:
        """Discard the gradients."""

    def replicated_tensors(self) -> Iterable[tuple[str, Tensor, dist.ProcessGroup]]:
        """Return tensors besides `shards` that must be bit-identical across a group, each as (name, tensor, group)."""

    def memory(self) -> dict[str, int]:
        """Return the bytes of device memory held by the engine on this rank, by kind. Not collective."""

    def accumulation_memory_summary(self) -> str:
        """Return a sentence for the log about the gradient memory held between microbatches. Not collective."""


def apply_data_parallel(model: Transformer, layout: Layout) -> DataParallel:
    """Apply the engine of `parallel.data_parallel` to `model` (on the meta device), in place. Collective.

    If no other rank shares this rank's parameters, fsdp2 has nothing to shard. Contiguous buffers then replace fsdp2,
    because they need no hooks, casts and copies for gathering and reducing. fsdp2 stays if the buffers would take
    more memory.
    """
    parallel = layout.parallel
    if parallel.data_parallel != "fsdp2":
        return Buffered(model, layout)
    if not (_alone(layout) and _buffers_take_no_more_memory(layout)):
        return FullySharded(model, layout)
    # The keys of the buffered engines do not apply to fsdp2.
    plain = {"data_parallel": "zero1", "check_gradients": "none", "symmetric_memory": False}
    engine = Buffered(model, replace(layout, parallel=parallel.model_copy(update=plain)))
    engine.name = "contiguous buffers (fsdp2 has nothing to shard here)"
    return engine


def _alone(layout: Layout) -> bool:
    """Return whether each of FSDP's meshes, for dense parameters and for experts, has only this rank."""
    meshes = layout.meshes
    return meshes.fsdp.size() == 1 and (layout.model.moe is None or meshes.fsdp_experts.size() == 1)


def _buffers_take_no_more_memory(layout: Layout) -> bool:
    """Return whether contiguous buffers take no more memory than fsdp2.

    True if the buffers' gradients are no wider than fsdp2's, and no configuration key (float8, cpu_offload,
    reshard_after_forward) lets fsdp2 hold less than the buffers. fsdp2 accumulates gradients in `storage`. Between
    microbatches it holds them in the wider of `storage` and `reduce`.
    """
    gradient = torch.promote_types(promoted(layout.compute), layout.reduce)
    held = layout.storage
    if layout.meshes.degrees.accumulation > 1:
        held = torch.promote_types(held, layout.reduce)
    return (
        held.itemsize >= gradient.itemsize
        and layout.precision.float8 == "none"
        and not layout.parallel.cpu_offload
        and layout.parallel.reshard_after_forward != "always"
    )
