"""The balancing state of all routers.

Each rank counts its own tokens. Every rank then updates the state from the same sums of integers. The state is in module
buffers, whole on every rank, so it does not depend on the data-parallel engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from forge.model import Transformer, update_routers
from forge.parallel.layout import Layout
from forge.shard import Box, Shard


@dataclass(frozen=True)
class RouterReport:
    """The routers' statistics of one step, on the device, equal on all ranks.

    values: float64 `[layers, n_experts + 5]`. Columns: the number of choices of each expert; balancing loss and z-loss,
    as means over valid tokens without their coefficients; number of dropped choices; lowest and highest bias after the
    step. layers: the layer number of each row.
    """

    values: Tensor
    layers: tuple[int, ...]


class Routers:
    """The routers of all mixtures of experts in this rank's `parts`."""

    def __init__(self, parts: Sequence[Transformer], layout: Layout):
        self._own = {layer: router for part in parts for layer, router in part.routers.items()}
        self._stage, self._pp = layout.meshes.stage, layout.meshes.pp
        self._layers, moe = tuple(self._own), layout.model.moe
        if self._pp.size() > 1 and moe is not None:
            layers = range(layout.model.n_layers + layout.model.mtp_depth)
            self._layers = tuple(layer for layer in layers if layout.model.has_experts(layer))
            self._columns = moe.n_experts + 5

    def update(self, skip: Tensor) -> RouterReport | None:
        """Update the balancing state by one step, unless `skip` (device scalar) is 1, and reset the counts.

        Collective: one all-reduce over the ranks of this stage for all layers together, and one over the pp ranks. Quantile
        balancing adds an all-reduce of histograms. Return the report, or None without routers.
        """
        if not self._layers:
            return None
        if self._pp.size() == 1:
            return RouterReport(self._update_own(skip), self._layers)
        values = torch.zeros(len(self._layers), self._columns, dtype=torch.float64, device=skip.device)
        if self._own:
            for layer, found in zip(self._own, self._update_own(skip), strict=True):
                values[self._layers.index(layer)] = found
        dist.all_reduce(values, group=self._pp)
        return RouterReport(values, self._layers)

    def _update_own(self, skip: Tensor) -> Tensor:
        """Update the layers on this rank. Return their rows of the report. Collective over the ranks of this stage."""
        routers = list(self._own.values())
        sums = torch.stack([router.sums for router in routers])
        if self._stage.size() > 1:
            dist.all_reduce(sums, group=self._stage)
        counts, losses, dropped = sums.split([routers[0].config.n_experts, 2, 1], dim=1)
        required = None
        if routers[0].config.balance == "quantile":
            required = torch.stack([router.required for router in routers])
            if self._stage.size() > 1:
                dist.all_reduce(required, group=self._stage)
        update_routers(routers, counts.to(torch.int64), skip, required)
        tokens = (counts.sum(1, keepdim=True) / routers[0].config.top_k).clamp(min=1)
        bias = torch.stack([router.bias for router in routers]).double()
        ends = bias.amin(1, keepdim=True), bias.amax(1, keepdim=True)
        return torch.cat([counts, losses / tokens, dropped, *ends], dim=1)

    def shards(self) -> list[Shard]:
        """Return the routers' state for checkpoints. Every rank holds the whole state."""
        copies = self._stage if self._stage.size() > 1 else None
        return [
            Shard(
                name=f"layers.{layer}.feed_forward.router.{name}",
                global_shape=state.shape,
                boxes=(Box((0,) * state.ndim, tuple(state.shape)),),
                parameter=state,
                replicas=copies,
                kind="router",
            )
            for layer, router in self._own.items()
            for name, state in (("bias", router.bias), ("previous_counts", router.previous_counts))
        ]
