"""`FullySharded`: the data-parallel engine on PyTorch's FSDP2.

Units: the embedding, every block, and the final norm with the head. A tied embedding is used at both ends of the model,
so it belongs to the root. If the routed experts of a layer are sharded over other ranks than the rest of their block,
they are a separate unit inside the block. forge/parallel/precision.py divides a unit whose modules compute in different
dtypes.

Gradients are summed, never averaged: the loss is divided by the global number of tokens before backward, so the sum
over ranks is the gradient. FSDP2's gradient divide factor is therefore 1.

Accumulation: each microbatch's gradient is reduce-scattered at once and held sharded in the storage dtype, so no
full-size gradient is held between microbatches (forge/parallel/engines/accumulate.py). The all-reduce over replicas runs
only in the last microbatch. `parallel.defer_gradient_reduction` makes one reduction per step instead and holds full-size
gradients until then. `parallel.reshard_after_forward = "never"` gathers parameters once per step.

A unit sharded over one rank only is always held in full size. Its gradients are accumulated unreduced. With
`reshard_after_forward = "auto"`, its parameters are cast once per step instead of once per microbatch.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard as Split

from forge.model import Experts, Router, Transformer
from forge.model.linear_attention import Decay
from forge.model.norm import promoted
from forge.parallel.engines.accumulate import SummingReduceScatter
from forge.parallel.float8 import gather_plain, scale_refresher
from forge.parallel.layout import Layout, frees_after_forward, local_box
from forge.parallel.precision import Unit, plan_units
from forge.parallel.step.gradients import sum_gradients
from forge.runtime import compat
from forge.runtime.errors import UserError
from forge.shard import Shard, local


class FullySharded:
    """The `DataParallel` engine on FSDP2.

    Shards `model` (on the meta device) in place. Units of experts are sharded over `meshes.fsdp_experts`, other units
    over `meshes.fsdp`. Raises UserError if precision.fp32_modules is invalid for the model, or splits a compiled block.
    """

    name = "fsdp2"
    shards: list[Shard]
    copies: dict[Tensor, Tensor]

    def __init__(self, model: Transformer, layout: Layout):
        # Number of elements on this rank while all units are gathered.
        self._unsharded_numel = sum(local(parameter).numel() for parameter in model.parameters())
        groups, dtypes = plan_units(model, layout.precision, experts_apart=_experts_apart(layout))
        whole = replicated_parameters(model, dtypes, layout)
        groups = [units_without(group, whole) for group in groups]
        self._whole = {name for name, parameter in model.named_parameters() if parameter in whole}
        if layout.compile.enabled:
            _refuse_units_in_blocks(model, groups)
        # Backward begins with the group after the last block and with the last block, so both stay gathered after forward.
        ends = len(groups) - (3 if model.norm is not None else 2)
        sharded = [
            [_shard_unit(unit, layout, whole, last=number >= ends) for unit in group]
            for number, group in enumerate(groups)
        ]
        if isinstance(model.embedding, FSDPModule) and groups[0][-1].modules == (model.embedding,):
            # The embedding's backward does not read its weight.
            model.embedding.set_unshard_in_backward(False)
        _set_prefetch(model, sharded, layout.parallel.prefetch)
        # Each unit's module, and whether this rank holds the whole unit.
        self._units = [
            (module, _degree(_mesh(unit, layout)) == 1)
            for modules, units in zip(sharded, groups, strict=True)
            for module, unit in zip(modules, units, strict=True)
        ]
        assert isinstance(model, FSDPModule)
        self._model, self._root, self._layout = model, model, layout
        # The sharded parameters are the compute parameters. Only float8 scales need a refresh.
        self._refresh_scales = scale_refresher(model)

    def allocate(self, device: torch.device) -> None:
        """Allocate module buffers on `device`, and shards on `device` or, under parallel.cpu_offload, on the CPU."""
        self._device = device
        self._model.to_empty(device="cpu" if self._layout.parallel.cpu_offload else device)
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        self.copies = {}  # none, because FSDP2 casts parameters while it gathers them
        self.shards = [
            _shard_of(name, parameter, self._layout, name in self._whole)
            for name, parameter in self._model.named_parameters()
        ]
        self._replicated = [shard for shard in self.shards if shard.name in self._whole]

    def begin_microbatch(self, *, last: bool) -> None:
        parallel = self._layout.parallel
        # `never` keeps gathered parameters until the end of the last microbatch. `auto` keeps them only if forward
        # frees nothing: in unshared units, and in a pipeline, which has other microbatches in flight. Parameters freed
        # after forward must be freed after backward too: otherwise recomputation in the next microbatch would issue
        # other operations than forward.
        choice = parallel.reshard_after_forward
        self._root.set_is_last_backward(last)
        for unit, alone in self._units:
            # The order matters: set_requires_gradient_sync also sets the all-reduce flag.
            unit.set_requires_gradient_sync(last or not (alone or _defers(self._layout)), recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            stays = choice == "never" or (choice == "auto" and (alone or parallel.pp > 1))
            unit.set_reshard_after_backward(last or not stays, recurse=False)

    def take_weight_gradients(self, *, last: bool) -> None:
        """Reduce the weight gradients that a pipeline schedule has computed separately. Otherwise backward's hooks do so."""
        for group in compat.fsdp_parameter_groups(self._root):
            group.post_backward()
        compat.end_fsdp_backward(self._root)

    def start_gradient_sync(self) -> None:
        """Do nothing, because the last backward reduces all units and waits for the reductions."""

    def finish_gradient_sync(self) -> None:
        if self._replicated:
            sum_gradients(self._replicated, self._layout.meshes.loss)

    def after_update(self, copied: Collection[Tensor] = ()) -> None:
        # Backward frees gathered parameters, but a forward without backward may have left some gathered.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                compat.finish_gathers(module)
                module.reshard()
        self._refresh_scales()

    def zero_gradients(self) -> None:
        self._model.zero_grad(set_to_none=True)

    def replicated_tensors(self) -> Iterable[tuple[str, Tensor, dist.ProcessGroup]]:
        return ()

    def memory(self) -> dict[str, int]:
        # Offloaded parameters are not on the device.
        here = [shard.data.nbytes for shard in self.shards if shard.data.device.type == self._device.type]
        return {"parameters": sum(here), "gradients": sum(here)}

    def accumulation_memory_summary(self) -> str:
        layout = self._layout
        if not _defers(layout):
            return "each microbatch's gradient is reduced at once and held sharded"
        size = layout.reduce.itemsize * self._unsharded_numel
        why = "parallel.defer_gradient_reduction" if layout.parallel.pp == 1 else "a pipeline"
        return (
            f"gradients are reduced once per step ({why}): until then every rank holds "
            f"{size / 2**20:.1f} MiB of unsharded {layout.precision.reduce} gradients"
        )


def _shard_unit(unit: Unit, layout: Layout, whole: set[nn.Parameter], *, last: bool) -> FSDPModule:
    mesh, reduce = _mesh(unit, layout), layout.reduce
    if unit.compute != layout.compute:
        reduce = torch.promote_types(reduce, unit.compute)
    reshard = _reshard_after_forward(layout, _degree(mesh), experts=unit.experts, last=last)
    if layout.precision.float8 == "mxfp8" and not reshard:
        gather_plain(unit.modules)
    offload = OffloadPolicy()
    if layout.parallel.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    fully_shard(
        list(unit.modules) if len(unit.modules) > 1 else unit.modules[0],  # type: ignore[arg-type]
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(unit.compute, reduce, cast_forward_inputs=False),
        reshard_after_forward=reshard,
        offload_policy=offload,
        ignored_params=whole,
        shard_placement_fn=functools.partial(
            _placement, experts=_expert_parameters(unit.modules), ranks=_degree(mesh)
        ),
    )
    module = unit.modules[0]
    assert isinstance(module, FSDPModule)
    if mesh.size() > 1:  # with one rank, FSDP2 would make a copy of the gradients only to divide them by 1
        module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if _expert_parameters(unit.modules) and hasattr(module, "set_reduce_scatter_unused_params"):
        # A user's dispatcher may use no expert in some microbatch of some rank. PyTorch 2.11 then loses gradients, or hangs.
        module.set_reduce_scatter_unused_params(True, recurse=False)
    summing: Any = SummingReduceScatter(module, adds=mesh.ndim == 1)  # FSDP2's base class is private
    module.set_custom_reduce_scatter(summing)
    return module


def _mesh(unit: Unit, layout: Layout) -> DeviceMesh:
    return layout.meshes.fsdp_experts if unit.experts else layout.meshes.fsdp


def _degree(mesh: DeviceMesh) -> int:
    """Return the number of ranks over which `mesh` shards, without replicas."""
    return mesh.size(mesh.ndim - 1)


def _experts_apart(layout: Layout) -> bool:
    """Return whether routed experts are always separate units.

    True if their ranks differ from the block's. Also true if blocks are resharded over fewer ranks: FSDP2 cannot
    reshard an expert's parameter that is split along dimension 1.
    """
    parallel = layout.parallel
    return parallel.ep > 1 or parallel.tp > 1 or isinstance(parallel.reshard_after_forward, int)


def _expert_parameters(modules: Sequence[nn.Module]) -> set[nn.Parameter]:
    experts = (part for module in modules for part in module.modules() if isinstance(part, Experts))
    return {parameter for module in experts for parameter in module.parameters()}


def _placement(parameter: nn.Parameter, experts: set[nn.Parameter], ranks: int) -> Split | None:
    """Return FSDP2's placement of a parameter; None for FSDP2's default.

    An expert parameter is split along dimension 0 (the experts), or 1 if there are fewer experts than ranks and `ranks`
    divides the size of dimension 1.
    """
    if parameter not in experts:
        return None
    n_experts = local(parameter).shape[0]
    return Split(1 if n_experts < ranks and parameter.shape[1] % ranks == 0 else 0)


def _defers(layout: Layout) -> bool:
    """Return whether gradients are reduced only in the last microbatch; always True in a pipeline."""
    return layout.parallel.defer_gradient_reduction or layout.parallel.pp > 1


def _reshard_after_forward(layout: Layout, degree: int, *, experts: bool, last: bool) -> bool | int:
    """Return FSDP2's `reshard_after_forward`: True, False, or the number of ranks to reshard over.

    `auto` frees a sharded unit's gathered parameters after forward. Exceptions are the last units of forward (`last`),
    which backward uses first, and every unit in a pipeline, where every microbatch would gather the parameters again.
    If parallel.reshard_after_forward is a number, experts are freed: FSDP2 cannot reshard over fewer ranks if
    parameters are also split over ep. degree: number of ranks sharding the unit.
    """
    choice = layout.parallel.reshard_after_forward
    if isinstance(choice, int) and experts:
        return degree > 1
    if isinstance(choice, int):
        return choice if 1 < choice < degree else choice == degree
    return frees_after_forward(layout) and (choice == "always" or (degree > 1 and not last))


def _set_prefetch(model: Transformer, groups: list[list[FSDPModule]], number: int) -> None:
    """Make FSDP2 gather the parameters of the next `number` units while a unit computes, in forward and in backward.

    number = 0: PyTorch's default, i.e. no explicit prefetch in forward and one unit in backward. Only the first group
    differs: PyTorch would prefetch the last unit of the microbatch before.
    """
    # Reverse each group into the order of forward, because a group's last unit encloses its other units.
    ordered = [group[::-1] for group in groups[:-1]]
    if number == 0:
        if ordered:
            # The first group has no earlier unit to prefetch, see below.
            outer, *inner = ordered[0]
            outer.set_modules_to_backward_prefetch(inner or [outer])
            for unit in inner:
                unit.set_modules_to_backward_prefetch([unit])
        return
    ends: list[object] = [model.embedding, *model.layers.values(), model.norm, model.head]
    # Multi-token prediction calls the embedding again after the last block. The second call must not gather the first
    # block: the block would stay gathered until backward, and mxfp8 weights would hold the codes for forward. So the
    # root prefetches the first block, and the embedding prefetches nothing.
    again = model.embedding if getattr(model, "ahead", ()) else None
    # The root prefetches for the first groups.
    root = groups[-1][-1]
    first = number if again is None else number + 1
    root.set_modules_to_forward_prefetch([module for group in ordered[:first] for module in group])
    for place, group in enumerate(ordered):
        after = [module for later in ordered[place + 1 : place + 1 + number] for module in later]
        before = [module for earlier in ordered[max(0, place - number) : place][::-1] for module in earlier]
        for unit in group:
            # A unit inside a block prefetches no other unit, because recomputation runs forward again and would gather
            # the next block. In backward, a block gathers its inner units before recomputation reaches them, as in
            # forward: selective checkpointing raises if recomputation runs operations not recorded in forward.
            if unit in ends and unit is not again:
                unit.set_modules_to_forward_prefetch(after)
            wanted = [*group[1:], *before] if unit in ends else []
            # An empty list would select PyTorch's default. Under accumulation, the default takes the last unit of the
            # previous microbatch as the first unit's predecessor and gathers it once more. It would stay gathered, and
            # mxfp8 weights would hold the codes for backward in the next forward. Prefetching the unit itself does
            # nothing, because it is already gathered.
            unit.set_modules_to_backward_prefetch(wanted or [unit])


def _refuse_units_in_blocks(model: Transformer, groups: list[list[Unit]]) -> None:
    units = [module for group in groups for unit in group for module in unit.modules]
    for block in model.layers.values():
        for name, module in block.named_modules():
            # Routers and routed experts are outside the compiled graphs.
            if name and module in units and not isinstance(module, Router | Experts):
                raise UserError(
                    f"precision.fp32_modules gives {name} another dtype than its block, but compile.enabled = true compiles "
                    "each block as one graph; use compile.enabled = false, or list only whole blocks, embedding, norm or "
                    "head"
                )


def _shard_of(name: str, parameter: nn.Parameter, layout: Layout, whole: bool) -> Shard:
    copies: tuple[str, ...] = ("dp_replicate", "dp_shard_cp") if whole else ()
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axes = zip(mesh.mesh_dim_names or (), parameter.placements, mesh.shape, strict=True)
        copies += tuple(axis for axis, placement, size in axes if placement.is_replicate() and size > 1)
    else:
        assert whole, f"{name} is not sharded"
    box = local_box(parameter)
    return Shard(
        name=name,
        global_shape=parameter.shape,
        boxes=(box,) if box.numel else (),
        parameter=parameter,
        replicas=layout.meshes.copies[copies] if copies else None,
    )


# Small parameters kept whole on every rank; their gradients are summed in one collective per step. Routers, and decays
# of linear attention, compute in another dtype than the block around them. FSDP would gather and reduce them separately
# from the block, in every layer and microbatch. Over many ranks, such collectives of a few megabytes cost mostly
# latency. Keeping them whole costs memory for parameters, gradients and moments: 0.4 GB for 40 routers of 256 experts
# with model.dim = 2560, all in float32.
def replicated_parameters(
    model: Transformer, dtypes: Mapping[nn.Parameter, torch.dtype], layout: Layout
) -> set[nn.Parameter]:
    """Return the parameters that stay whole on every rank.

    Router and Decay parameters are included if their storage and compute dtypes are equal. A Decay computing in the wider
    of float32 and precision.compute is also included, because it casts its parameters itself. Routers are left out if
    nothing is sharded. The set is empty under cpu_offload.
    """
    if layout.parallel.cpu_offload:
        return set()
    kinds = Decay if layout.meshes.fsdp.size() == 1 else Router | Decay
    small = [module for module in model.modules() if isinstance(module, kinds)]
    wide = promoted(layout.compute)
    return {
        p
        for m in small
        for p in m.parameters()
        if dtypes[p] == p.dtype or (isinstance(m, Decay) and dtypes[p] == wide)
    }


def units_without(units: Sequence[Unit], parameters: set[nn.Parameter]) -> list[Unit]:
    """Return `units` without the modules whose parameters are all in `parameters`. Units left without modules are dropped."""
    kept = []
    for unit in units:
        modules = tuple(
            m for m in unit.modules if not parameters.issuperset(m.parameters()) or not list(m.parameters())
        )
        if modules:
            kept.append(replace(unit, modules=modules))
    return kept
