"""Which buffers a model needs, what lies in each, and over which ranks it is shared and summed."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from forge.model import Transformer
from forge.model.precision import promoted
from forge.parallel.buffered.layout import BufferLayout, Item, default_bucket_numel, lay_out
from forge.parallel.expert import parameter_kinds
from forge.parallel.layout import Layout
from forge.parallel.units import plan_units


@dataclass(frozen=True)
class Axes:
    """Groups of more than one rank, for parameters of one kind.

    scatter: share gradients and optimizer state, one group after the other. add: hold copies of them.
    copies: the mesh axes of `add`. alike: all ranks that compute with the same values, perhaps only this one.
    """

    scatter: tuple[dist.ProcessGroup, ...]
    add: tuple[dist.ProcessGroup, ...]
    copies: tuple[str, ...]
    alike: dist.ProcessGroup

    @property
    def parts(self) -> int:
        return prod(group.size() for group in self.scatter)

    @property
    def part(self) -> int:
        """Which of the parts is this rank's."""
        part = 0
        for group in self.scatter:
            part = part * group.size() + group.rank()
        return part


@dataclass(frozen=True)
class Formats:
    """compute: what the model computes with. storage: what the optimizer updates. gradient: in which gradients add up
    over microbatches. reduce: in which they travel."""

    compute: torch.dtype
    storage: torch.dtype
    gradient: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True)
class BufferPlan:
    """One buffer; in its layout the parameter that forward needs last comes first, as backward is done with it first."""

    formats: Formats
    axes: Axes
    layout: BufferLayout

    @property
    def narrowed(self) -> bool:
        """Whether gradients travel in another format than they are added up in."""
        return self.formats.reduce != self.formats.gradient and bool(self.axes.scatter or self.axes.add)


def plan_buffers(model: Transformer, layout: Layout) -> list[BufferPlan]:
    """The buffers of `model` (on the meta device).

    Raises UserError if precision.fp32_modules cannot be followed.
    """
    _, dtypes = plan_units(model, layout.precision)
    kinds = parameter_kinds(model)
    members: dict[tuple[Formats, bool], list[Item]] = {}
    for name, parameter in reversed(list(model.named_parameters())):
        expert = kinds.get(parameter) == "expert"
        key = _formats_of(parameter, dtypes[parameter], layout), expert
        # Both ends of the model use it. On its own it is cut alike wherever else it lies.
        alone = model.config.tie_embeddings and name == "embedding.weight"
        members.setdefault(key, []).append(Item(name, _slot_numel(parameter), alone))
    plans = []
    for (formats, expert), items in members.items():
        axes = _axes_of(layout, expert=expert)
        chosen = layout.parallel.bucket_size
        numel = default_bucket_numel(layout.meshes.loss.size()) if chosen == "auto" else chosen
        plans.append(BufferPlan(formats, axes, lay_out(items, parts=axes.parts, bucket_numel=numel)))
    return plans


def _axes_of(layout: Layout, *, expert: bool) -> Axes:
    """ddp: all data ranks hold copies. zero1, zero2: the ranks of one copy share, or those of all copies."""
    parallel, meshes = layout.parallel, layout.meshes
    shard = "ep_shard" if expert else "dp_shard_cp"
    mesh = meshes.fsdp_experts if expert else meshes.fsdp
    share, replicate = mesh.get_group(shard), meshes.copies[("dp_replicate",)]
    alike = meshes.copies[("dp_replicate", shard)]
    if parallel.data_parallel == "ddp":
        add = _several(alike)
        return Axes((), add, ("dp_replicate", shard) if add else (), alike)
    if parallel.shard_optimizer_over == "dp":
        return Axes(_several(share, replicate), (), (), alike)
    add = _several(replicate)
    return Axes(_several(share), add, ("dp_replicate",) if add else (), alike)


def _formats_of(parameter: nn.Parameter, compute: torch.dtype, layout: Layout) -> Formats:
    """Gradients add up in promote(float32, compute) at least, and travel in `precision.reduce`."""
    reduce = layout.reduce
    if compute != layout.compute:  # pinned
        reduce = torch.promote_types(reduce, compute)
    return Formats(compute, parameter.dtype, torch.promote_types(promoted(compute), reduce), reduce)


def _slot_numel(parameter: nn.Parameter) -> int:
    """Elements of the parameter on the rank that has most of it, so that layouts are the same on all.

    Only so do ranks of tensor parallelism keep the same elements of a parameter that is whole on each of them.
    """
    sizes = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for ranks, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            if not placement.is_replicate():
                sizes[placement.dim] = -(-sizes[placement.dim] // ranks)  # type: ignore[attr-defined]
    return prod(sizes)


def _several(*groups: dist.ProcessGroup) -> tuple[dist.ProcessGroup, ...]:
    return tuple(group for group in groups if group.size() > 1)
