"""The memory of one buffer (compute weights, gradients, master copies), and collectives on its buckets.

compute    [numel]               parameters in precision.compute; the model's parameters are views of it
masters    [part of numel]       parameters in precision.storage, updated by the optimizer; if storage and compute
                                 have the same dtype, a view of this rank's part of `compute`
gradients  [numel], zero2: part  accumulated in float32 at least. Under ddp and zero1, the gradients of the first
                                 microbatch overwrite the buffer, and every `.grad` becomes a view of it. Autograd adds
                                 later gradients in place (torch.Tensor.grad_dtype), so the buffer is never zeroed

A bucket is cut into parts over one group of ranks, or over two groups in turn. The first group has the ranks of one
copy of the model. The second group, used with parallel.shard_optimizer_over = "dp", has this rank's counterpart in
every copy. Only `own_part` knows this order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge.parallel.engines.buffered.plan import Bucket, BufferPlan, Slot, flat_boxes
from forge.parallel.layout import local_box
from forge.parallel.mesh import Meshes
from forge.runtime import compat
from forge.shard import Shard

ProcessGroups: TypeAlias = Sequence[dist.ProcessGroup]


def own_part(whole: Tensor, groups: ProcessGroups) -> Tensor:
    """Return a view of this rank's part of `whole` `[n]`. Each group in turn splits the part left by the groups before it."""
    for group in groups:
        whole = whole.view(group.size(), -1)[group.rank()]
    return whole


def address(tensor: Tensor) -> tuple[int, int]:
    """Return the identity of the tensor's storage, and the tensor's offset in it.

    Unlike `data_ptr`, the function also works for fake tensors.
    """
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


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


def sum_to_parts(whole: Tensor, shard: ProcessGroups, replicate: ProcessGroups) -> Iterator[dist.Work]:
    """Sum `whole` over the ranks of all groups into `own_part(whole, shard)`.

    Overwrites the rest of `whole`. Yields each started collective; the caller waits for it before taking the next.
    """
    for group in shard:
        part = own_part(whole, [group])
        yield compat.reduce_scatter_into(part, whole, group)
        whole = part
    for group in replicate:
        yield dist.all_reduce(whole, group=group, async_op=True)


def gather_parts(whole: Tensor, shard: ProcessGroups) -> Iterator[dist.Work]:
    """All-gather every rank's `own_part` into `whole`. Yields collectives as `sum_to_parts` does."""
    for number in reversed(range(len(shard))):
        outer = own_part(whole, shard[:number])
        yield compat.all_gather_into(outer, own_part(outer, [shard[number]]), shard[number])


class AsyncCollectives:
    """Collectives that run one after another.

    On CUDA the constructor enqueues all of them on `stream`, after the work already in the current stream. On the CPU
    (no stream) the constructor starts the first collective; `advance` and `finish` start the others.
    """

    def __init__(self, collectives: Iterator[dist.Work], stream: torch.cuda.Stream | None):
        self._collectives = collectives
        self._work: dist.Work | None = None
        self._event: torch.cuda.Event | None = None
        if stream is None:
            self._work = next(collectives, None)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for work in collectives:
                work.wait()
            self._event = stream.record_event()

    def advance(self) -> None:
        """On the CPU, wait for the running collective and start the next one. On CUDA, do nothing."""
        if self._work is not None:
            self._work.wait()
            self._work = next(self._collectives, None)

    def finish(self) -> None:
        """Make later computation on this device wait for the results. On the CPU, first run the remaining collectives."""
        while self._work is not None:
            self.advance()
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class TemporaryBuckets:
    """At most two temporary buckets, shared by all buckets of an engine.

    sizes: bytes needed by each bucket. Memory is allocated at its first use and kept until `free`. With `symmetric`
    groups, the constructor allocates the groups' symmetric memory, and `free` has no effect.
    """

    def __init__(self, sizes: Collection[int], device: torch.device, symmetric: ProcessGroups = ()):
        self._limit, self._nbytes, self._device = min(2, len(sizes)), max(sizes, default=0), device
        self._free: list[Tensor] = []
        self._registered = bool(symmetric)
        with compat.communication_memory(device, symmetric, symmetric=self._registered):
            if self._registered:
                self._free = [self._allocate() for _ in range(self._limit)]
        self._used: dict[tuple[int, int], Tensor] = {}
        self.nbytes = self._limit * self._nbytes
        self.peak = 0
        """Largest number of temporary buckets allocated at once."""

    @property
    def exhausted(self) -> bool:
        return len(self._used) == self._limit

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor `[numel]` of `dtype`. The caller passes the tensor to `release` after use."""
        assert not self.exhausted and numel * dtype.itemsize <= self._nbytes
        if not self._free:
            self._free.append(self._allocate())
        memory = self._free.pop()
        self._used[address(memory)] = memory
        self.peak = max(self.peak, len(self._used) + len(self._free))
        return memory[: numel * dtype.itemsize].view(dtype)

    def release(self, bucket: Tensor) -> None:
        self._free.append(self._used.pop(address(bucket)))

    def free(self) -> None:
        """Free the memory of released buckets, unless it is registered with NCCL."""
        if not self._registered:
            self._free.clear()

    def _allocate(self) -> Tensor:
        return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
