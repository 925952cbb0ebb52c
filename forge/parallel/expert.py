"""Expert parallelism: the ranks of the ep axis share the experts of a layer, and each routes tokens of its own.

Only what is inside a mixture of experts changes: its weights are split over ep by expert, and the dispatcher brings
tokens to where their experts are. The ep axis may span data, context and tensor ranks; tensor parallelism never splits an
expert. With sequence parallelism a tensor rank routes the piece of the sequence that it has anyway; without, its share of
the whole sequence, and the outputs are gathered. So no token is computed twice, and a router's weight, whole on every
rank, has partial gradients over tp (forge/parallel/tensor/apply.py). Dispatch is all-to-all:

    sort by expert | counts to their ranks | rows to their experts | compute | rows back | weigh and add up

Each rank sends one row for each expert that each of its tokens chose, without padding: the counts are sent in one small
exchange, then the rows, there and back (Lepikhin et al. 2020, "GShard"; dropless as in Gale et al. 2022, "MegaBlocks").
The host waits for the device once per layer and microbatch, for the numbers of rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard as Split
from torch.nn import functional as F

from forge.model import Experts, MoE, Transformer, host
from forge.model.dispatch import EAGER, combine, permute, spread
from forge.parallel.layout import Layout
from forge.parallel.modules import replace_module
from forge.parallel.step.collectives import gather_for_all, own_piece, sum_over
from forge.parallel.tensor.local import distributed, local_tensor
from forge.runtime import compat

log = logging.getLogger(__name__)


def apply_expert(model: Transformer, layout: Layout) -> None:
    """Spread the experts of `model` (on the meta device) over the ep ranks, in place."""
    moe, meshes = layout.model.moe, layout.meshes
    assert moe is not None
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, MoE):
            continue
        if meshes.sequence.size() > 1:
            layer.router.sum_over_sequence = functools.partial(sum_over, ranks=meshes.sequence)
        if meshes.ep.size() > 1:
            replace_module(layer, "experts", LocalExperts(layer.experts, meshes.ep))
            layer.dispatch = AllToAllDispatcher(meshes.ep.get_group(), moe.n_experts)
        if meshes.tp.size() > 1:
            replace_module(model, name, PieceRoutedMoE(layer, layout))
    outside = [key for key in ("capacity_factor", "router_noise") if getattr(moe, key)]
    if outside and dist.get_world_size() > 1:
        keys = " and ".join(f"model.moe.{key}" for key in outside)
        log.info("results depend on the layout: %s", keys)


class LocalExperts(Experts):
    """The experts that this rank has, of weights that are split over ep."""

    def __init__(self, plain: Experts, mesh: DeviceMesh):
        n_experts, dim, hidden_dim = plain.w2.shape
        with torch.device("meta"):
            super().__init__(n_experts, dim, hidden_dim, plain.activation, plain.w2_bias is not None)
        for name, weight in plain.named_parameters():
            self.register_parameter(name, distributed(weight, mesh, Split(0)))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows `[n, dim]`, sorted by expert, counts int64 `[n_experts / ep]` of each one's -> `[n, dim]`."""
        biases = (None if bias is None else local_tensor(bias) for bias in (self.w13_bias, self.w2_bias))
        return self.compute(rows, counts, local_tensor(self.w13), local_tensor(self.w2), *biases)


class PieceRoutedMoE(MoE):
    """A mixture in which each tensor rank routes its own piece of the sequence."""

    def __init__(self, plain: MoE, layout: Layout):
        nn.Module.__init__(self)
        self.router, self.experts = plain.router, plain.experts
        self.shared, self.shared_gate = plain.shared, plain.shared_gate
        self.to_latent, self.latent_norm, self.from_latent = (
            plain.to_latent,
            plain.latent_norm,
            plain.from_latent,
        )
        self.dispatch = plain.dispatch
        self.mesh, self.whole_stream = layout.meshes.tp, not layout.parallel.sequence_parallel

    def routed(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """x `[batch, seq / tp, dim]`, or the whole sequence on every rank, labels `[batch, seq]` -> shaped like x."""
        if labels is not None:
            labels = own_piece(labels, self.mesh)
        if not self.whole_stream:
            return super().routed(x, labels)
        return gather_for_all(super().routed(own_piece(x, self.mesh), labels), self.mesh)


class AllToAllDispatcher:
    """A Dispatcher (forge/model/dispatch.py) for experts spread over `group`: equally many on each rank, in order."""

    def __init__(self, group: dist.ProcessGroup, n_experts: int):
        self.group, self.n_experts = group, n_experts
        # An attribute, because the planner, which has no data, knows no counts.
        self.sizes = sizes_from_counts
        self.kernels = EAGER

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """x `[tokens, dim]`, experts int64 and weights `[tokens, top_k]` -> `[tokens, dim]`."""
        # Sorted by expert, so by rank. The device does it while the host waits for the counts.
        rows, plan = spread(x, experts, self.n_experts, self.kernels)
        # How many rows go to each expert of each rank, and how many come from each rank for the experts here.
        leaving = plan.counts.view(self.group.size(), -1)  # [ranks, experts of each]
        arriving = functional.wait_tensor(functional.all_to_all_single(leaving, None, None, self.group))
        sends, receives = self.sizes(leaving, arriving)

        # There. Dropped choices come last; they stay here and count as zeros.
        dropped = experts.numel() - sum(sends)
        rows = rows[:-dropped] if dropped else rows
        rows = compat.all_to_all(rows, self.group, receives, sends)
        # Here: rows came sorted by rank; the experts take them sorted by expert.
        order, places, counts = self.kernels.group(arriving, sum(receives))
        rows = permute(compute(permute(rows, order, places), counts), places, order)
        # Back, to where each row came from.
        rows = compat.all_to_all(rows, self.group, sends, receives)
        rows = F.pad(rows, (0, 0, 0, dropped)) if dropped else rows
        return combine(rows, weights, plan, self.kernels)


def sizes_from_counts(leaving: Tensor, arriving: Tensor) -> tuple[list[int], list[int]]:
    """Return how many rows go to each rank and come from it; both int64 `[ranks, local experts]`.

    Waits for the device, except in recomputation.
    """
    sends, receives = ([sum(rank) for rank in ranks] for ranks in host.read(torch.stack([leaving, arriving])))
    return sends, receives
