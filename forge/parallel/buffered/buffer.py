"""The memory of one buffer: what the model computes with, its gradients, and this rank's part of what is optimised.

compute    [numel]               parameters in precision.compute; the model's parameters are views of it
masters    [part of numel]       parameters in precision.storage, updated by the optimizer; where that is the format
                                 of `compute`, they are this rank's part of it
gradients  [numel], zero2: part  added up in float32 at least; where whole, every `.grad` is a view of it and autograd
                                 adds in place (torch.Tensor.grad_dtype)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge.parallel.buffered.communication import Groups, own_part
from forge.parallel.buffered.layout import Bucket, Slot, slice_boxes
from forge.parallel.buffered.plan import BufferPlan
from forge.parallel.fsdp import own_box
from forge.parallel.mesh import Meshes
from forge.shard import Box, Kind, Shard


class Held:
    """A parameter of the model in its slot; `gradient` is its `.grad` for good, where gradients are whole."""

    def __init__(self, parameter: nn.Parameter, slot: Slot):
        self.name, self.parameter, self.slot = slot.name, parameter, slot
        self.gradient = parameter.grad
        self.numel = _local(parameter).numel()
        self._address = _local(parameter).data_ptr()

    def check(self) -> None:
        """Raises RuntimeError if other memory has been put in the place of the buffer's."""
        if self.gradient is not None and self.parameter.grad is not self.gradient:
            raise RuntimeError(
                f"the gradient of {self.name} does not lie in its contiguous buffer any more: something called zero_grad() "
                f"or set .grad; call zero_gradients() of the parallel model instead"
            )
        if _local(self.parameter).data_ptr() != self._address:
            raise RuntimeError(
                f"{self.name} does not lie in its contiguous buffer any more: something replaced .data; write into the "
                f"shards of the parallel model and call its after_update() instead"
            )


@dataclass(frozen=True)
class BucketMemory:
    """Views of one bucket: all of `compute`, of this rank's part `own` and `master`, and `gradient`, all or part."""

    bucket: Bucket
    compute: Tensor
    own: Tensor
    master: Tensor
    gradient: Tensor
    held: tuple[Held, ...]


class Buffer:
    """Memory for `plan` on `device`, all zeros, and parameters of the model in the place of `originals`.

    `sharded_gradients`: there are gradients only of the part that is left of a bucket after the first of the groups
    that share it. `allocating` is entered around what collectives will read and write.
    """

    def __init__(
        self,
        plan: BufferPlan,
        originals: dict[str, nn.Parameter],
        device: torch.device,
        *,
        sharded_gradients: bool,
        allocating: Callable[[Groups], AbstractContextManager[None]],
    ):
        self.plan = plan
        self.sharded_gradients = sharded_gradients
        formats, layout, groups = plan.formats, plan.layout, plan.axes.scatter
        self.microbatch_groups: Groups = groups[:1] if sharded_gradients else ()
        """What gradients are summed over before they are added up."""
        ranks = prod(group.size() for group in self.microbatch_groups)
        numel = sum(b.numel // ranks for b in layout.buckets) if sharded_gradients else layout.numel
        with allocating([*groups, *plan.axes.add]):
            self.compute = torch.zeros(layout.numel, dtype=formats.compute, device=device)
            self.gradients = torch.zeros(numel, dtype=formats.gradient, device=device)
        self.masters = None
        if formats.storage != formats.compute:
            self.masters = torch.zeros(layout.part_numel, dtype=formats.storage, device=device)
        self.buckets: list[BucketMemory] = []
        in_masters = in_gradients = 0
        for bucket in layout.buckets:
            kept = bucket.numel // ranks
            compute = self.compute[bucket.start : bucket.stop]
            own = own_part(compute, groups)
            self.buckets.append(
                BucketMemory(
                    bucket,
                    compute,
                    own,
                    own if self.masters is None else self.masters[in_masters:][: bucket.part_numel],
                    self.gradients[in_gradients:][:kept]
                    if sharded_gradients
                    else self.gradients[bucket.start : bucket.stop],
                    tuple(Held(self._place(slot, originals[slot.name]), slot) for slot in bucket.slots),
                )
            )
            in_masters += bucket.part_numel
            in_gradients += kept

    def _place(self, slot: Slot, original: nn.Parameter) -> nn.Parameter:
        shape = local_box(original).sizes
        # `.data`: else all parameters would share one version counter, and gathering one would spoil autograd's
        # record of the others.
        data = self.compute[slot.start :][: prod(shape)].view(shape).data
        parameter = nn.Parameter(_like(original, data), requires_grad=original.requires_grad)
        if not self.sharded_gradients:
            parameter.grad_dtype = self.gradients.dtype
            parameter.grad = _like(original, self.gradients[slot.start :][: prod(shape)].view(shape))
        return parameter

    def shards(self, kinds: dict[str, Kind], meshes: Meshes) -> list[Shard]:
        """What this rank optimises of each parameter: flat slices of masters, with gradients that stay where they are."""
        pieces = {piece.name: piece for piece in self.plan.layout.pieces(self.plan.axes.part)}
        shards = []
        for memory in self.buckets:
            gradients = own_part(memory.gradient, self.plan.axes.scatter[len(self.microbatch_groups) :])
            for held in memory.held:
                at = start = stop = 0
                if held.name in pieces:
                    piece = pieces[held.name]
                    # A rank of tensor parallelism may have fewer rows than there is place for.
                    at, start, stop = piece.at, min(piece.start, held.numel), min(piece.stop, held.numel)
                leaf = memory.master[at:][: stop - start].detach()
                leaf.grad_dtype = None  # any
                leaf.grad = gradients[at:][: stop - start]
                shards.append(
                    Shard(
                        name=held.name,
                        global_shape=held.parameter.shape,
                        boxes=_boxes(held.parameter, start, stop),
                        parameter=leaf,
                        replicas=self._replicas(held.parameter, meshes),
                        kind=kinds[held.name],
                    )
                )
        return shards

    def _replicas(self, parameter: nn.Parameter, meshes: Meshes) -> dist.ProcessGroup | None:
        axes = self.plan.axes.copies
        if isinstance(parameter, DTensor):
            names = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
            axes += tuple(name for name, placement in names if placement.is_replicate())
        return meshes.copies[axes] if axes else None


def local_box(parameter: nn.Parameter) -> Box:
    """What of the parameter the ranks of tensor or expert parallelism leave to this one."""
    if isinstance(parameter, DTensor):
        return own_box(parameter)
    return Box((0,) * parameter.ndim, tuple(parameter.shape))


def _boxes(parameter: nn.Parameter, start: int, stop: int) -> tuple[Box, ...]:
    """Elements [start, stop) of this rank's part of the parameter, as boxes of the whole."""
    local = local_box(parameter)
    return tuple(
        Box(tuple(a + b for a, b in zip(local.offsets, box.offsets, strict=True)), box.sizes)
        for box in slice_boxes(local.sizes, start, stop)
    )


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _like(original: nn.Parameter, local: Tensor) -> Tensor:
    """`local` as this rank's part of a tensor that is distributed as `original` is."""
    if not isinstance(original, DTensor):
        return local
    return DTensor.from_local(
        local,
        original.device_mesh,
        original.placements,
        run_check=False,
        shape=original.shape,
        stride=original.stride(),
    )
