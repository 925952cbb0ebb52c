"""Expert parallelism: the ranks of the ep axis divide the experts of a layer, and each rank routes its own tokens.

Only the inside of a mixture of experts changes: each rank holds the weights of its experts, and the dispatcher
(forge/parallel/dispatch.py) sends tokens to the ranks of their experts. The ep axis may span data, context and tensor
ranks. Tensor parallelism never splits an expert. With sequence parallelism, a tensor rank holds and routes a piece of
the sequence. Without sequence parallelism, a tensor rank holds the whole sequence, routes a piece, and gathers the
outputs. No token is computed twice. The router's weight is whole on every rank, and its gradients are partial sums over
tp (forge/parallel/tensor/apply.py).
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard as Split

from forge.model import Experts, MoE, Transformer
from forge.model.dispatch import Dispatcher
from forge.parallel.dispatch import AllToAllDispatcher, NodeDispatcher
from forge.parallel.layout import Layout
from forge.parallel.mesh import Meshes
from forge.parallel.modules import replace_module
from forge.parallel.step.collectives import gather_for_all, own_piece, sum_over
from forge.parallel.tensor.local import distributed, local_tensor

log = logging.getLogger(__name__)


def apply_expert(model: Transformer, layout: Layout) -> None:
    """Distribute the experts of `model` (on the meta device) over the ep ranks, in place."""
    moe, meshes = layout.model.moe, layout.meshes
    assert moe is not None
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, MoE):
            continue
        if meshes.sequence.size() > 1:
            layer.router.sum_over_sequence = functools.partial(sum_over, ranks=meshes.sequence)
        if meshes.ep.size() > 1:
            replace_module(layer, "experts", LocalExperts(layer.experts, meshes.ep))
            layer.dispatch = _dispatcher(meshes, moe.n_experts, 2 if layout.parallel.ep_overlap else 1)
        if meshes.tp.size() > 1:
            replace_module(model, name, PieceRoutedMoE(layer, layout))
    if meshes.ep_node.size() > 1:
        nodes, ranks = meshes.ep_node.size(), meshes.ep_local.size()
        log.info(
            "experts are on %d nodes with %d ranks each: each token is sent to each node at most once",
            nodes,
            ranks,
        )
    outside = [key for key in ("capacity_factor", "router_noise") if getattr(moe, key)]
    if outside and dist.get_world_size() > 1:
        keys = " and ".join(f"model.moe.{key}" for key in outside)
        log.info("results depend on the layout, because of %s", keys)


def _dispatcher(meshes: Meshes, n_experts: int, parts: int) -> Dispatcher:
    if meshes.ep_node.size() > 1:
        return NodeDispatcher(meshes.ep_node, meshes.ep_local, n_experts, parts)
    return AllToAllDispatcher(meshes.ep.get_group(), n_experts, parts)


class LocalExperts(Experts):
    """The experts on this rank. Their weights are DTensors split over ep by expert."""

    def __init__(self, plain: Experts, mesh: DeviceMesh):
        n_experts, dim, hidden_dim = plain.w2.shape
        with torch.device("meta"):
            super().__init__(n_experts, dim, hidden_dim, plain.activation, plain.w2_bias is not None)
        for name, weight in plain.named_parameters():
            self.register_parameter(name, distributed(weight, mesh, Split(0)))

    def held(self) -> tuple[Tensor | None, ...]:
        """Return w13, w2 and the two biases of the n_experts / ep experts on this rank; None for a missing bias."""
        return tuple(None if weight is None else local_tensor(weight) for weight in super().held())


class PieceRoutedMoE(MoE):
    """A mixture of experts in which each tensor rank routes its own piece of the sequence."""

    def __init__(self, plain: MoE, layout: Layout):
        nn.Module.__init__(self)
        self.router, self.experts = plain.router, plain.experts
        self.shared, self.shared_gate = plain.shared, plain.shared_gate
        self.to_latent, self.latent_norm, self.from_latent = (
            plain.to_latent,
            plain.latent_norm,
            plain.from_latent,
        )
        self.dispatch, self.rounding = plain.dispatch, plain.rounding
        self.mesh, self.whole_stream = layout.meshes.tp, not layout.parallel.sequence_parallel

    def routed(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Return the output of the chosen experts, shaped like x. Without sequence parallelism, collective over tp.

        x `[batch, seq / tp, dim]` under sequence parallelism, else `[batch, seq, dim]`, equal on every tp rank. labels
        `[batch, seq]`.
        """
        if labels is not None:
            labels = own_piece(labels, self.mesh)
        if not self.whole_stream:
            return super().routed(x, labels)
        return gather_for_all(super().routed(own_piece(x, self.mesh), labels), self.mesh)
