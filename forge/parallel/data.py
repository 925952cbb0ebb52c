"""`DataParallel`: how ranks that read different data share one model, and the choice between the ways to do it.

The layer above asks every engine the same few things in the same order, whether a parameter is gathered unit by unit
or lies in a contiguous buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge.model import Transformer
from forge.model.precision import promoted
from forge.parallel import fsdp
from forge.parallel.buffered import Buffered
from forge.parallel.float8 import scale_refresher
from forge.parallel.layout import Layout
from forge.shard import Shard


class DataParallel(Protocol):
    """An engine that has been put on one model, or on one part of a model. Every method is collective."""

    shards: list[Shard]
    """What training updates, in the order of `named_parameters`; there once there is memory."""

    def allocate(self, device: torch.device) -> None:
        """Give this rank memory for its part of the model, in which nothing means anything yet."""

    def begin_microbatch(self, *, last: bool) -> None:
        """Said before each forward that has a backward, in a pipeline just before the backward.

        `last`: that backward is the optimizer step's last.
        """

    def take_weight_gradients(self, *, last: bool) -> None:
        """Said after weights' gradients that a pipeline computed by themselves; `last`: of the step."""

    def start_gradient_sync(self) -> None:
        """After the last backward: all sums over ranks that read data are on their way."""

    def finish_gradient_sync(self) -> None:
        """The shards' gradients are those sums."""

    def after_update(self) -> None:
        """What the model computes with follows its shards; said when they have been written to."""

    def zero_gradients(self) -> None:
        """Forget the gradients."""

    def replicated_tensors(self) -> Iterable[tuple[str, Tensor, dist.ProcessGroup]]:
        """What ranks compute with alike besides their shards: name, something to compare, the ranks."""

    def memory(self) -> dict[str, int]:
        """What this rank's device holds through a step, in bytes by kind. Not collective."""

    def accumulation_memory_summary(self) -> str:
        """What lies in memory between the microbatches of a step, for the log. Not collective."""


def apply_data_parallel(model: Transformer, layout: Layout) -> DataParallel:
    """Put the engine that `parallel.data_parallel` names on `model` (on the meta device), in place. Collective.

    fsdp2 has nothing to shard where no other rank has the same parameters. Contiguous buffers then hold as much and
    spend no hooks, casts and copies on gathering and reducing, so they take its place.
    """
    parallel = layout.parallel
    if parallel.data_parallel != "fsdp2":
        return Buffered(model, layout)
    if not (_alone(layout) and _buffers_hold_as_much(layout)):
        return FullySharded(model, layout)
    # What is said of buffers is not meant for fsdp2.
    plain = {"data_parallel": "zero1", "check_gradients": "none", "symmetric_memory": False}
    return Buffered(model, replace(layout, parallel=parallel.model_copy(update=plain)))


def _alone(layout: Layout) -> bool:
    """Whether this rank shares neither parameters nor experts with ranks that read other data."""
    meshes = layout.meshes
    return meshes.fsdp.size() == 1 and (layout.model.moe is None or meshes.fsdp_experts.size() == 1)


def _buffers_hold_as_much(layout: Layout) -> bool:
    """Whether nothing is asked for that takes less memory under fsdp2 even in one process."""
    gradient = torch.promote_types(promoted(layout.compute), layout.reduce)
    return (
        layout.storage.itemsize >= gradient.itemsize
        and layout.precision.float8 == "none"
        and not layout.parallel.cpu_offload
        and layout.parallel.reshard_after_forward != "always"
    )


class FullySharded:
    """PyTorch's FSDP2: see forge/parallel/fsdp.py."""

    shards: list[Shard]

    def __init__(self, model: Transformer, layout: Layout):
        fsdp.apply_fsdp(model, layout)
        self._model: nn.Module = model
        self._layout = layout
        # What is sharded is what is computed with, but for the scales of weights that are gathered in float8.
        self._refresh_scales = scale_refresher(model)

    def allocate(self, device: torch.device) -> None:
        self._device = device
        fsdp.allocate(self._model, self._layout, device)
        self.shards = fsdp.fsdp_shards(self._model, self._layout.meshes)

    def begin_microbatch(self, *, last: bool) -> None:
        fsdp.begin_microbatch(self._model, last=last)

    def take_weight_gradients(self, *, last: bool) -> None:
        fsdp.take_weight_gradients(self._model, last=last)

    def start_gradient_sync(self) -> None:
        """FSDP2 has done it inside the last backward."""

    def finish_gradient_sync(self) -> None:
        """And has waited at its end."""

    def after_update(self) -> None:
        fsdp.forget_gathered(self._model)
        self._refresh_scales()

    def zero_gradients(self) -> None:
        self._model.zero_grad(set_to_none=True)

    def replicated_tensors(self) -> Iterable[tuple[str, Tensor, dist.ProcessGroup]]:
        return ()

    def memory(self) -> dict[str, int]:
        # What is offloaded lies elsewhere.
        here = [shard.data.nbytes for shard in self.shards if shard.data.device.type == self._device.type]
        return {"parameters": sum(here), "gradients": sum(here)}

    def accumulation_memory_summary(self) -> str:
        return fsdp.accumulation_memory_summary(self._layout, self.shards)
