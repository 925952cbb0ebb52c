"""The memory of one buffer: compute weights, their gradients, and this rank's master copies.

compute    [numel]               parameters in precision.compute; the model's parameters are views of it
masters    [part of numel]       parameters in precision.storage, updated by the optimizer; if storage and compute
                                 have the same dtype, a view of this rank's part of `compute`
gradients  [numel], zero2: part  accumulated in float32 at least. Under ddp and zero1, the gradients of the first
                                 microbatch overwrite the buffer, and every `.grad` becomes a view of it. Autograd adds
                                 later gradients in place (torch.Tensor.grad_dtype), so the buffer is never zeroed
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge.parallel.engines.buffered.communication import ProcessGroups, address, own_part
from forge.parallel.engines.buffered.layout import Bucket, Slot, flat_boxes
from forge.parallel.engines.buffered.plan import BufferPlan
from forge.parallel.layout import local_box
from forge.parallel.mesh import Meshes
from forge.runtime import compat
from forge.shard import Shard


class PlacedParameter:
    """A parameter of the model, in its slot of a buffer.

    gradient: the parameter's slot in the gradient buffer; None if this rank keeps only part of the gradients (zero2).
    During a step's first microbatch, `.grad` is None or autograd's own tensor. From then on `.grad` is `gradient`.
    place: `gradient` itself or, if `gradient` is a DTensor, its local tensor.
    """

    def __init__(self, parameter: nn.Parameter, slot: Slot, gradient: Tensor | None):
        self.name, self.parameter, self.slot, self.gradient = slot.name, parameter, slot, gradient
        self.place: Any = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        self.numel = _local(parameter).numel()
        self._address = address(_local(parameter))

    def check(self) -> None:
        """Raise RuntimeError if the parameter or its gradient is no longer a view of the buffer."""
        if self.gradient is not None and self.parameter.grad is not self.gradient:
            raise RuntimeError(
                f"the gradient of {self.name} is no longer in its contiguous buffer, because zero_grad() was called or "
                f".grad was set; call zero_gradients() of the parallel model instead"
            )
        if address(_local(self.parameter)) != self._address:
            raise RuntimeError(
                f"{self.name} is no longer in its contiguous buffer, because .data was replaced; write into the shards "
                f"of the parallel model and call its after_update() instead"
            )


@dataclass(frozen=True, eq=False)
class BucketMemory:
    """Views of one bucket of a buffer.

    compute: the whole bucket of weights. own: this rank's part of `compute`. master: this rank's part of the master
    copies. gradient: the whole bucket of gradients; under zero2, this rank's part. shards: the shards stored in `master`.
    microbatch_groups: under zero2, the groups over which each microbatch's gradients are summed; otherwise empty.
    """

    plan: BufferPlan
    bucket: Bucket
    compute: Tensor
    own: Tensor
    master: Tensor
    gradient: Tensor
    microbatch_groups: ProcessGroups
    parameters: tuple[PlacedParameter, ...]
    shards: list[Shard]

    def is_copied(self, parameters: Collection[Tensor]) -> bool:
        """Return whether `parameters` contains every parameter with elements in this rank's part of the bucket."""
        return all(shard.parameter in parameters or not shard.boxes for shard in self.shards)


class Buffer:
    """Memory for `plan` on `device`, all zeros, and new parameters in it, to replace the model's `originals`.

    microbatch_groups: groups over which each microbatch's gradients are summed before accumulation; only this rank's
    part of the sum is kept. Empty: gradients are summed once, after all microbatches.
    symmetric_memory: allocate the buffers of collectives in NCCL's symmetric memory.
    """

    def __init__(
        self,
        plan: BufferPlan,
        originals: dict[str, nn.Parameter],
        device: torch.device,
        *,
        microbatch_groups: ProcessGroups,
        symmetric_memory: bool,
    ):
        self.plan = plan
        self.sharded_gradients = bool(microbatch_groups)
        formats, groups, buckets = plan.formats, plan.groups, plan.buckets
        kept = [bucket.numel // prod(group.size() for group in microbatch_groups) for bucket in buckets]
        numel = sum(kept) if self.sharded_gradients else plan.numel
        all_groups = [*groups.shard, *groups.replicate]
        with compat.communication_memory(device, all_groups, symmetric=symmetric_memory):
            self.compute = torch.zeros(plan.numel, dtype=formats.compute, device=device)
            self.gradients = torch.zeros(numel, dtype=formats.gradient, device=device)
        compute = [self.compute[bucket.start : bucket.stop] for bucket in buckets]
        own = masters = [own_part(bucket, groups.shard) for bucket in compute]
        gradients = [self.gradients[bucket.start : bucket.stop] for bucket in buckets]
        if self.sharded_gradients:
            gradients = list(self.gradients.split(kept))
        self.masters = None
        if formats.storage != formats.compute:
            parts = [bucket.part_numel for bucket in buckets]
            self.masters = torch.zeros(sum(parts), dtype=formats.storage, device=device)
            masters = list(self.masters.split(parts))
        views = zip(buckets, compute, own, masters, gradients, strict=True)
        self.copies: dict[Tensor, Tensor] = {}
        self.buckets = [
            BucketMemory(
                plan=plan,
                bucket=bucket,
                compute=whole,
                own=part,
                master=master,
                gradient=gradient,
                microbatch_groups=microbatch_groups,
                parameters=tuple(
                    PlacedParameter(*self._place(slot, originals[slot.name])) for slot in bucket.slots
                ),
                shards=[],
            )
            for bucket, whole, part, master, gradient in views
        ]

    def _place(self, slot: Slot, original: nn.Parameter) -> tuple[nn.Parameter, Slot, Tensor | None]:
        shape = local_box(original).sizes
        # `.data`, because otherwise all parameters would share one version counter: after gathering one bucket,
        # autograd would report all weights saved for backward as modified in place.
        data = self.compute[slot.start :][: prod(shape)].view(shape).data
        parameter = nn.Parameter(_like(original, data), requires_grad=original.requires_grad)
        if self.sharded_gradients:
            return parameter, slot, None
        parameter.grad_dtype = None  # allow any: autograd adds bfloat16 to float32 in one pass
        return parameter, slot, _like(original, self.gradients[slot.start :][: prod(shape)].view(shape))

    def shards(self, meshes: Meshes) -> list[Shard]:
        """Return this rank's shard of each parameter, a flat slice of the masters. Its gradient is a view of `gradients`."""
        for memory in self.buckets:
            gradients = own_part(memory.gradient, self.plan.groups.shard[len(memory.microbatch_groups) :])
            for placed in memory.parameters:
                start, stop, at = memory.bucket.kept(placed.slot, self.plan.groups.part)
                # A slot has room for the largest tensor-parallel part of the parameter; this rank's part may be
                # smaller.
                start, stop = min(start, placed.numel), min(stop, placed.numel)
                leaf = memory.master[at:][: stop - start].detach()
                leaf.grad_dtype = None  # allow any dtype
                leaf.grad = gradients[at:][: stop - start]
                if memory.master is not memory.own:
                    self.copies[leaf] = memory.own[at:][: stop - start]
                memory.shards.append(
                    Shard(
                        name=placed.name,
                        global_shape=placed.parameter.shape,
                        boxes=flat_boxes(local_box(placed.parameter), start, stop),
                        parameter=leaf,
                        replicas=self._replicas(placed.parameter, meshes),
                    )
                )
        return [shard for memory in self.buckets for shard in memory.shards]

    def _replicas(self, parameter: nn.Parameter, meshes: Meshes) -> dist.ProcessGroup | None:
        groups = self.plan.groups
        axes = groups.replicate_axes if groups.replicate else ()
        if isinstance(parameter, DTensor):
            names = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
            axes += tuple(name for name, placement in names if placement.is_replicate())
        return meshes.copies[axes] if axes else None


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _like(original: nn.Parameter, local: Tensor) -> Tensor:
    """Return `local` as this rank's part of a DTensor with the placements of `original`; plain if `original` is plain."""
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
