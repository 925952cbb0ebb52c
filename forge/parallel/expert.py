"""Expert parallelism: the ranks of the ep axis share the experts of a layer, and each routes tokens of its own.

Only what is inside a mixture of experts changes: its weights are split over ep by expert, and the dispatcher brings
tokens to where their experts are. The ep axis may span data, context and tensor ranks alike; tensor parallelism never
splits an expert. With sequence parallelism a tensor rank routes the piece of the sequence that it has anyway; without,
its share of the whole sequence, and the outputs are gathered. So no token is computed twice, and a router's weight, whole
on every rank, sees part of the tokens only: its gradient is open over tp (forge/parallel/tensor.py).
"""

from __future__ import annotations

import functools
import logging
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard as Split

from forge.model import Experts, MoE, Router, Transformer
from forge.model.experts import grouped_swiglu
from forge.parallel.collectives import gather_for_all, own_piece, sum_over
from forge.parallel.expert_dispatch import AllToAllDispatcher
from forge.parallel.layout import Layout
from forge.parallel.tensor import distribute
from forge.shard import Kind

log = logging.getLogger(__name__)


def apply_expert(model: Transformer, layout: Layout) -> None:
    """Spread the experts of `model` (on the meta device) over the ep ranks, in place; a dense model stays as it is."""
    moe, meshes = layout.model.moe, layout.meshes
    if moe is None:
        return
    for layer in [module for module in model.modules() if isinstance(module, MoE)]:
        if meshes.ep.size() > 1:
            distribute(layer.experts, meshes.ep, Split(0))
            layer.experts.__class__ = _LocalExperts
            layer.dispatch = AllToAllDispatcher(meshes.ep.get_group(), moe.n_experts)
        if meshes.tp.size() > 1:
            layer.__class__ = _PieceRouted
            pieces = cast(_PieceRouted, layer)
            pieces.mesh, pieces.whole_stream = meshes.tp, not layout.parallel.sequence_parallel
        if meshes.sequence.size() > 1:
            layer.router.sum_over_sequence = functools.partial(sum_over, ranks=meshes.sequence)
    outside = [key for key in ("capacity_factor", "router_noise") if getattr(moe, key)]
    if outside and dist.get_world_size() > 1:
        keys = " and ".join(f"model.moe.{key}" for key in outside)
        log.info("results depend on the layout: %s", keys)


class _LocalExperts(Experts):
    """The experts that this rank has, of weights that are split over ep."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        w13, w2 = (cast(DTensor, weight).to_local() for weight in (self.w13, self.w2))
        return grouped_swiglu(rows, w13, w2, counts)


class _PieceRouted(MoE):
    """Routes only this rank's piece of the sequence. `whole_stream`: x is the whole sequence on every rank of `mesh`."""

    mesh: DeviceMesh
    whole_stream: bool

    def routed(self, x: Tensor, labels: Tensor | None) -> Tensor:
        if labels is not None:
            labels = own_piece(labels, self.mesh)
        if not self.whole_stream:
            return super().routed(x, labels)
        return gather_for_all(super().routed(own_piece(x, self.mesh), labels), self.mesh)


def parameter_kinds(model: nn.Module) -> dict[nn.Parameter, Kind]:
    """The parameters of experts and of routers in `model`; all others are dense."""
    kinds: dict[nn.Parameter, Kind] = {}
    for module in model.modules():
        if isinstance(module, Experts | Router):
            kinds |= dict.fromkeys(module.parameters(), "expert" if isinstance(module, Experts) else "router")
    return kinds
