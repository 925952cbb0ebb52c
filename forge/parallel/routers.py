"""The state of all routers of a model part between optimizer steps: counted by each rank, moved by all alike.

Independent of the engine: state lies in buffers, whole on every rank, and moves by the same integers everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from forge.model import Router, update_routers
from forge.parallel.mesh import Meshes
from forge.shard import Box, Shard

STATE = ("bias", "previous_counts")


@dataclass(frozen=True)
class RouterReport:
    """What the routers did in one step; device values, equal on all ranks.

    values: float64 `[layers, n_experts + 5]`: choices of each expert | balancing loss and z-loss, means over valid tokens
    without their coefficients | choices dropped | lowest and highest bias, after the step. layers: whose rows these are.
    """

    values: Tensor
    layers: tuple[int, ...]


class Routers:
    """The routers of one or more parts of a model, by layer; of a dense one none, and then nothing is done or sent."""

    def __init__(self, routers: dict[int, Router], meshes: Meshes):
        self._layers = tuple(routers)
        self._routers = list(routers.values())
        self._group = meshes.stage

    def update(self, skip: Tensor) -> RouterReport | None:
        """Move balancing state by one step, unless `skip` (device scalar) is 1, and begin counting anew.

        Collective: one all-reduce over all ranks that carry tokens, for all layers together.
        """
        if not self._routers:
            return None
        counted = torch.stack([router.counts for router in self._routers])
        losses = torch.stack([router.losses for router in self._routers])
        dropped = torch.stack([router.dropped for router in self._routers])
        # Counts stay exact: float64 holds integers up to 2^53.
        sums = torch.cat([counted.double(), losses, dropped.double().unsqueeze(1)], dim=1)
        if self._group.size() > 1:
            dist.all_reduce(sums, group=self._group)
        n_experts, top_k = counted.shape[1], self._routers[0].config.top_k
        counts = sums[:, :n_experts]
        update_routers(self._routers, counts.to(torch.int64), skip)
        tokens = (counts.sum(1, keepdim=True) / top_k).clamp(min=1)
        bias = torch.stack([router.bias for router in self._routers]).double()
        values = torch.cat(
            [
                counts,
                sums[:, n_experts : n_experts + 2] / tokens,
                sums[:, n_experts + 2 :],
                bias.amin(1, keepdim=True),
                bias.amax(1, keepdim=True),
            ],
            dim=1,
        )
        return RouterReport(values, self._layers)

    def shards(self) -> list[Shard]:
        """What checkpoints keep of the routers, by name; whole on every rank."""
        return [
            _whole(f"layers.{layer}.feed_forward.router.{name}", getattr(router, name), self._group)
            for layer, router in zip(self._layers, self._routers, strict=True)
            for name in STATE
        ]


def _whole(name: str, buffer: Tensor, group: dist.ProcessGroup) -> Shard:
    return Shard(
        name=name,
        global_shape=buffer.shape,
        boxes=(Box((0,) * buffer.ndim, tuple(buffer.shape)),),
        parameter=buffer,
        replicas=group if group.size() > 1 else None,
        kind="router",
    )
