"""`FullySharded`: the data-parallel engine on PyTorch's FSDP2.

Units: the embedding, every block, and the final norm with the head. A tied embedding is shared by both ends of the model
and so belongs to the root. The routed experts of a layer are a unit inside its block, sharded over other ranks: those that
share one expert. forge/parallel/precision.py divides a unit whose modules compute in different dtypes. Gradients are
summed, never averaged: the loss is divided by the global number of tokens before backward, so a sum over ranks is the
gradient (torch.distributed.fsdp.fully_shard: gradient divide factor).

Accumulation: each microbatch's gradient is reduce-scattered at once and held sharded in the storage dtype, so no full-size
gradient waits for the last microbatch. With replicas the all-reduce over them happens only in the last microbatch.
`parallel.defer_gradient_reduction` does the opposite: one reduction per step, and full-size gradients until then.
`parallel.reshard_after_forward = "never"` gathers parameters once per step. A rank with an unshared copy of the model holds
everything in full size anyway. Its gradients are added up in backward, and its parameters are cast once per step instead of
once per microbatch.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

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
from forge.parallel.float8 import gather_plain, scale_refresher
from forge.parallel.layout import Layout, local_box
from forge.parallel.precision import Unit, plan_units
from forge.parallel.step.gradients import sum_gradients
from forge.runtime import compat
from forge.runtime.errors import UserError
from forge.shard import Shard, local


class FullySharded:
    """FSDP2 on `model`, which is on the meta device and is sharded in place.

    Dense parameters are sharded over `meshes.fsdp`, experts over `meshes.fsdp_experts`.

    A `DataParallel` (forge/parallel/engines/engine.py). Raises UserError if precision.fp32_modules cannot be followed.
    """

    name = "fsdp2"
    shards: list[Shard]
    copies: dict[Tensor, Tensor]

    def __init__(self, model: Transformer, layout: Layout):
        # This rank's part of the model once all units are gathered.
        self._unsharded_numel = sum(local(parameter).numel() for parameter in model.parameters())
        groups, dtypes = plan_units(model, layout.precision)
        whole = replicated_parameters(model, dtypes, layout)
        groups = [units_without(group, whole) for group in groups]
        self._whole = {name for name, parameter in model.named_parameters() if parameter in whole}
        if layout.compile.enabled:
            _refuse_units_in_blocks(model, groups)
        # Backward needs the end of the model again at once: the last block, and the group after it.
        ends = len(groups) - (3 if model.norm is not None else 2)
        sharded = [
            [_shard_unit(unit, layout, whole, last=number >= ends) for unit in group]
            for number, group in enumerate(groups)
        ]
        if isinstance(model.embedding, FSDPModule) and groups[0][-1].modules == (model.embedding,):
            # Its backward adds to rows and never reads them.
            model.embedding.set_unshard_in_backward(False)
        _set_prefetch(model, sharded, layout.parallel.prefetch)
        # Every unit, and whether this rank holds all of it.
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
        """Allocate shards, which are on the CPU under parallel.cpu_offload, and buffers, which are always on `device`."""
        self._device = device
        self._model.to_empty(device="cpu" if self._layout.parallel.cpu_offload else device)
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        self.copies = {}  # FSDP2 casts in its gather
        self.shards = [
            _shard_of(name, parameter, self._layout, name in self._whole)
            for name, parameter in self._model.named_parameters()
        ]
        self._replicated = [shard for shard in self.shards if shard.name in self._whole]

    def begin_microbatch(self, *, last: bool) -> None:
        parallel = self._layout.parallel
        # `never` keeps gathered parameters until the last microbatch is done. `auto` does so if forward frees nothing:
        # in a pipeline, because other microbatches are in flight, and in unshared units. Parameters freed by forward
        # must not stay: recomputation gathers them again, and would issue other operations than forward.
        choice = parallel.reshard_after_forward
        self._root.set_is_last_backward(last)
        for unit, alone in self._units:
            # In this order: set_requires_gradient_sync switches the all-reduce as well.
            unit.set_requires_gradient_sync(last or not (alone or _defers(self._layout)), recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            stays = choice == "never" or (choice == "auto" and (alone or parallel.pp > 1))
            unit.set_reshard_after_backward(last or not stays, recurse=False)

    def take_weight_gradients(self, *, last: bool) -> None:
        """Reduce gradients that were computed outside of a backward, as backward's hooks would."""
        for group in compat.fsdp_parameter_groups(self._root):
            group.post_backward()
        compat.end_fsdp_backward(self._root)

    def start_gradient_sync(self) -> None:
        """Do nothing: FSDP2 has reduced its units inside the last backward, and waited at its end."""

    def finish_gradient_sync(self) -> None:
        if self._replicated:
            sum_gradients(self._replicated, self._layout.meshes.loss)

    def after_update(self, copied: Collection[Tensor] = ()) -> None:
        # Backward frees gathered parameters, but parameters gathered by a forward without backward may still be there.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
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
        shard_placement_fn=functools.partial(_expert_placement, ranks=_degree(mesh))
        if unit.experts
        else None,
    )
    module = unit.modules[0]
    assert isinstance(module, FSDPModule)
    if mesh.size() > 1:  # a rank by itself would copy its gradients once more, only to divide them by 1
        module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    return module


def _mesh(unit: Unit, layout: Layout) -> DeviceMesh:
    return layout.meshes.fsdp_experts if unit.experts else layout.meshes.fsdp


def _degree(mesh: DeviceMesh) -> int:
    """Return the number of ranks over which `mesh` shards; replicas do not count."""
    return mesh.size(mesh.ndim - 1)


def _expert_placement(parameter: nn.Parameter, ranks: int) -> Split:
    """Return the dimension along which an expert parameter is sharded.

    With fewer experts than ranks it is the dimension after that of experts, provided that `ranks` divides its size.
    Otherwise it is the dimension of experts.
    """
    n_experts = local(parameter).shape[0]
    return Split(1 if n_experts < ranks and parameter.shape[1] % ranks == 0 else 0)


def _defers(layout: Layout) -> bool:
    """Return whether gradients are reduced in the last microbatch only; always True in a pipeline."""
    return layout.parallel.defer_gradient_reduction or layout.parallel.pp > 1


def _reshard_after_forward(layout: Layout, degree: int, *, experts: bool, last: bool) -> bool | int:
    """Return whether gathered parameters are freed after forward; a number: they stay sharded over this many ranks.

    `auto` frees them if another rank holds part of them, except for the first units of backward (`last`). In a pipeline
    `auto` never frees them, because they would be gathered again for every microbatch. If the key is a number, experts
    are freed: FSDP2 cannot keep parameters sharded over fewer ranks if they are split over ep. degree: ranks that shard
    the parameters.
    """
    choice = layout.parallel.reshard_after_forward
    if isinstance(choice, int) and experts:
        return degree > 1
    if isinstance(choice, int):
        return choice if 1 < choice < degree else choice == degree
    auto = degree > 1 and not last and layout.parallel.pp == 1
    return {"always": True, "never": False, "auto": auto}[choice]


def _set_prefetch(model: Transformer, groups: list[list[FSDPModule]], number: int) -> None:
    """Let FSDP2 gather the parameters of the next `number` units while one computes, in forward and in backward.

    0 uses PyTorch's default: no prefetch in forward beyond the overlap of its streams, one unit in backward.
    """
    if number == 0:
        return
    ends: list[object] = [model.embedding, *model.layers.values(), model.norm, model.head]
    # Each group in the order of forward's use: the last unit encloses the others.
    ordered = [group[::-1] for group in groups[:-1]]
    # Multi-token prediction calls the embedding again after the last block. The second call must not gather the first
    # block, which would stay gathered until backward, with mxfp8 weights in the codes of forward. So the root gathers the
    # first block, and the embedding prefetches nothing.
    again = model.embedding if getattr(model, "ahead", ()) else None
    # Before the first group computes, the root gathers for it.
    root = groups[-1][-1]
    first = number if again is None else number + 1
    root.set_modules_to_forward_prefetch([module for group in ordered[:first] for module in group])
    for place, group in enumerate(ordered):
        after = [module for later in ordered[place + 1 : place + 1 + number] for module in later]
        before = [module for earlier in ordered[max(0, place - number) : place][::-1] for module in earlier]
        for unit in group:
            # A unit inside a block prefetches no other unit: recomputation, which runs forward again, would gather the
            # next block. And units inside are gathered before recomputation reaches them, as in forward: selective
            # checkpointing does not allow it more operations than it has recorded.
            if unit in ends and unit is not again:
                unit.set_modules_to_forward_prefetch(after)
            wanted = [*group[1:], *before] if unit in ends else []
            # An empty list would mean PyTorch's choice, which under accumulation takes the first unit's predecessor to
            # be the last unit of the microbatch before and gathers it once more. The unit itself is gathered already.
            unit.set_modules_to_backward_prefetch(wanted or [unit])


def _refuse_units_in_blocks(model: Transformer, groups: list[list[Unit]]) -> None:
    units = [module for group in groups for unit in group for module in unit.modules]
    for block in model.layers.values():
        for name, module in block.named_modules():
            # Routing and routed experts are outside of the graphs.
            if name and module in units and not isinstance(module, Router | Experts):
                raise UserError(
                    f"precision.fp32_modules splits blocks at {name}, but compile.enabled = true makes each block one "
                    f"graph; set compile.enabled to false, or pin whole blocks, embedding, norm or head."
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


# Small parameters that every rank keeps whole; their gradients are summed in one collective per step. Routers, and decays of
# linear attention, compute in another dtype than the block around them. FSDP would gather and reduce them apart from the
# block, in every layer and microbatch: a collective of a few megabytes is all latency over many ranks. Whole on every rank
# they cost the bytes of their parameters, gradients and moments: 0.4 GB for 40 routers of 256 experts on a stream of 2560, in
# float32 with float32 moments.
def replicated_parameters(
    model: Transformer, dtypes: Mapping[nn.Parameter, torch.dtype], layout: Layout
) -> set[nn.Parameter]:
    """Return the parameters that stay whole on every rank.

    They are those of routers that compute without a cast, and those of decays, which cast themselves.

    The set is empty if nothing is sharded or everything is offloaded.
    """
    if layout.meshes.fsdp.size() == 1 or layout.parallel.cpu_offload:
        return set()
    small = [module for module in model.modules() if isinstance(module, Router | Decay)]
    return {p for m in small for p in m.parameters() if isinstance(m, Decay) or dtypes[p] == p.dtype}


def units_without(units: Sequence[Unit], parameters: set[nn.Parameter]) -> list[Unit]:
    """Return `units` without `parameters`. Units and modules that have no other parameters are dropped."""
    kept = []
    for unit in units:
        modules = tuple(
            m for m in unit.modules if not parameters.issuperset(m.parameters()) or not list(m.parameters())
        )
        if modules:
            kept.append(replace(unit, modules=modules))
    return kept
