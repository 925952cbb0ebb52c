"""The buffers of a model: the place of each parameter, the elements owned by each rank, and the groups that communicate.

    buffer   | bucket 0                              | bucket 1                | ...
             | slot a        | slot b   | slot c  |..| slot d     | slot e  |..|       .. padding
    ranks    | rank 0      | rank 1      | rank 2    | rank 0 | rank 1 | rank 2 |

A slot holds one parameter. A bucket is sent in one collective and cut into equal parts, one per rank, at any element of
any parameter. So padding is a few elements per bucket; rows are not padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from forge.model import Transformer
from forge.model.norm import promoted
from forge.parallel.initialize import parameter_kinds
from forge.parallel.layout import Layout
from forge.parallel.precision import plan_units
from forge.shard import Box

# In elements. Parameters begin at multiples of 64, so kernels can use their widest loads. Parts of ranks begin at
# multiples of 8: 16 bytes of bfloat16, NCCL's widest load.
SLOT_ALIGNMENT = 64
PART_ALIGNMENT = 8


@dataclass(frozen=True)
class BufferItem:
    """A parameter to place in the buffer. alone: True to give the parameter a bucket of its own."""

    name: str
    numel: int
    alone: bool = False


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: elements [start, stop) of the buffer."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Elements [start, start + parts * part_numel) of the buffer, sent in one collective. Each rank has one part."""

    start: int
    part_numel: int
    parts: int
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return self.parts * self.part_numel

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def kept(self, slot: Slot, part: int) -> tuple[int, int, int]:
        """Return (start, stop, at): the elements of `slot` on the rank with part number `part` of the bucket.

        The rank holds elements [start, stop) of the flattened parameter. They begin at element `at` of the rank's part of
        the bucket. (0, 0, 0): the rank holds none.
        """
        begin = self.start + part * self.part_numel
        start, stop = max(slot.start, begin), min(slot.stop, begin + self.part_numel)
        return (start - slot.start, stop - slot.start, start - begin) if start < stop else (0, 0, 0)


@dataclass(frozen=True)
class Groups:
    """Process groups for dense parameters, or for experts.

    Groups of one rank are left out. shard: groups over which gradients and optimizer state are sharded, outermost
    first. shard_axes: the mesh axis of each group in `shard`. replicate: groups of ranks with replicas of a shard.
    replicate_axes: the mesh axes of these groups. same_weights: group of ranks with equal compute weights; it may have
    only this rank.
    """

    shard: tuple[dist.ProcessGroup, ...]
    replicate: tuple[dist.ProcessGroup, ...]
    replicate_axes: tuple[str, ...]
    same_weights: dist.ProcessGroup
    shard_axes: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        return prod(group.size() for group in self.shard)

    @property
    def part(self) -> int:
        """Return the index of this rank's part of each bucket, from 0."""
        return self._part([group.rank() for group in self.shard])

    def part_at(self, at: Mapping[str, int]) -> int:
        """Return the index of another rank's part of each bucket. at: the other rank's position on each mesh axis."""
        return self._part([at[axis] for axis in self.shard_axes])

    def _part(self, places: list[int]) -> int:
        part = 0
        for group, place in zip(self.shard, places, strict=True):
            part = part * group.size() + place
        return part


@dataclass(frozen=True)
class Formats:
    """The dtypes of a buffer's tensors.

    compute: the model's weights. storage: the master copies. gradient: gradients accumulated over microbatches.
    reduce: gradients in collectives.
    """

    compute: torch.dtype
    storage: torch.dtype
    gradient: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True)
class BufferPlan:
    """One buffer. Parameters are in the reverse order of forward, because backward finishes the last parameter first."""

    formats: Formats
    groups: Groups
    buckets: tuple[Bucket, ...]

    @property
    def numel(self) -> int:
        return self.buckets[-1].stop

    @property
    def casts_gradients(self) -> bool:
        """Return whether gradients are accumulated in one dtype and reduced in another."""
        sent = bool(self.groups.shard or self.groups.replicate)
        return sent and self.formats.reduce != self.formats.gradient


def plan_buffers(model: Transformer, layout: Layout) -> list[BufferPlan]:
    """Plan the buffers of `model` (on the meta device).

    Raises UserError if precision.fp32_modules is invalid for the model.
    """
    _, dtypes = plan_units(model, layout.precision)
    kinds = parameter_kinds(model)
    members: dict[tuple[Formats, bool], list[BufferItem]] = {}
    for name, parameter in reversed(list(model.named_parameters())):
        expert = kinds.get(parameter) == "expert"
        key = _formats_of(parameter, dtypes[parameter], layout), expert
        # The first and the last stage may both hold the embedding. A separate bucket is cut equally on both stages.
        alone = model.config.embedding_at_both_ends and name == "embedding.weight"
        members.setdefault(key, []).append(BufferItem(name, _slot_numel(parameter), alone))
    plans = []
    for (formats, expert), items in members.items():
        groups = _groups_of(layout, expert=expert)
        chosen = layout.parallel.bucket_size
        numel = default_bucket_numel(layout.meshes.loss.size()) if chosen == "auto" else chosen
        plans.append(BufferPlan(formats, groups, lay_out(items, parts=groups.parts, bucket_numel=numel)))
    return plans


def _groups_of(layout: Layout, *, expert: bool) -> Groups:
    """Return the process groups over which the engine shards and replicates parameters.

    ddp: all data ranks hold replicas. zero1, zero2: the ranks of one copy of the model shard its parameters; with
    parallel.shard_optimizer_over = "dp", the ranks of all copies do so together.
    """
    parallel, meshes = layout.parallel, layout.meshes
    axis = "ep_shard" if expert else "dp_shard_cp"
    one_copy = (meshes.fsdp_experts if expert else meshes.fsdp).get_group(axis)
    copies, everyone = meshes.copies[("dp_replicate",)], meshes.copies[("dp_replicate", axis)]
    if parallel.data_parallel == "ddp":
        return Groups((), _several(everyone), ("dp_replicate", axis), everyone)
    over_copies = parallel.shard_optimizer_over == "dp"
    split = {axis: one_copy, "dp_replicate": copies} if over_copies else {axis: one_copy}
    split = {name: group for name, group in split.items() if _several(group)}
    replicate, axes = ((), ()) if over_copies else (_several(copies), ("dp_replicate",))
    return Groups(tuple(split.values()), replicate, axes, everyone, shard_axes=tuple(split))


def _formats_of(parameter: nn.Parameter, compute: torch.dtype, layout: Layout) -> Formats:
    """Return the dtypes of a parameter's buffer.

    Gradients are reduced in `precision.reduce`, and accumulated in the widest of `precision.reduce`, float32 and
    `compute`.
    """
    reduce = layout.reduce
    if compute != layout.compute:  # pinned to a wider dtype
        reduce = torch.promote_types(reduce, compute)
    return Formats(compute, parameter.dtype, torch.promote_types(promoted(compute), reduce), reduce)


def _slot_numel(parameter: nn.Parameter) -> int:
    """Return the largest number of elements of the parameter on any tensor-parallel rank.

    Slots of this size give all ranks the same layout. With different layouts, tensor-parallel ranks would keep
    different elements of a replicated parameter.
    """
    sizes = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for ranks, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            if not placement.is_replicate():
                sizes[placement.dim] = -(-sizes[placement.dim] // ranks)  # type: ignore[attr-defined]
    return prod(sizes)


def _several(*groups: dist.ProcessGroup) -> tuple[dist.ProcessGroup, ...]:
    return tuple(group for group in groups if group.size() > 1)


def lay_out(items: Sequence[BufferItem], *, parts: int, bucket_numel: int) -> tuple[Bucket, ...]:
    """Lay out `items` in order. A bucket is closed when it has `bucket_numel` elements or more; 0: one bucket for all.

    parts: number of ranks that share a bucket.
    """
    buckets: list[Bucket] = []
    start = 0
    for group in _divide(items, bucket_numel):
        slots, end = [], start
        for item in group:
            begin = round_up(end, SLOT_ALIGNMENT)
            end = begin + item.numel
            slots.append(Slot(item.name, begin, end))
        part_numel = round_up(-(-(end - start) // parts), PART_ALIGNMENT)
        buckets.append(Bucket(start, part_numel, parts, tuple(slots)))
        start = round_up(buckets[-1].stop, SLOT_ALIGNMENT)
    return tuple(buckets)


def _divide(items: Sequence[BufferItem], bucket_numel: int) -> Iterator[list[BufferItem]]:
    group: list[BufferItem] = []
    numel = 0
    for item in items:
        if group and (item.alone or group[-1].alone or (bucket_numel and numel >= bucket_numel)):
            yield group
            group, numel = [], 0
        group.append(item)
        numel += item.numel
    if group:
        yield group


def default_bucket_numel(ranks: int) -> int:
    """Return a bucket size, in elements, large enough to hide the latency of a ring of `ranks` ranks.

    The rule is Megatron-Core's (DistributedDataParallelConfig.bucket_size).
    """
    return max(40_000_000, 1_000_000 * ranks)


def slice_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that cover elements [start, stop) of a row-major tensor of `shape`, in row-major order.

    All whole rows form one box. The partial rows before and after them are cut recursively. There are at most
    2 * ndim - 1 boxes.
    """
    if start >= stop:
        return
    if start == 0 and stop == prod(shape):
        yield Box((0,) * len(shape), tuple(shape))
        return
    row, rest = prod(shape[1:]), shape[1:]
    first, last = -(-start // row), stop // row
    if first > last:  # inside of one row
        yield from _in_row(last, rest, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(first - 1, rest, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *(0 for _ in rest)), (last - first, *rest))
    if last * row < stop:
        yield from _in_row(last, rest, 0, stop - last * row)


def _in_row(index: int, shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    for box in slice_boxes(shape, start, stop):
        yield Box((index, *box.offsets), (1, *box.sizes))


def flat_boxes(local: Box, start: int, stop: int) -> tuple[Box, ...]:
    """Return elements [start, stop) of the flattened box `local` as boxes of the global tensor."""
    return tuple(
        Box(tuple(a + b for a, b in zip(local.offsets, box.offsets, strict=True)), box.sizes)
        for box in slice_boxes(local.sizes, start, stop)
    )


def round_up(number: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `number`."""
    return -(-number // unit) * unit
