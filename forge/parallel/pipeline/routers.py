"""The routers of a pipeline: each stage moves its own, and every rank gets the report of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from forge.config import Config
from forge.model import Transformer
from forge.parallel.mesh import Meshes
from forge.parallel.routers import RouterReport, Routers
from forge.shard import Shard


class StageRouters:
    """Those of `parts`, which are this rank's of the model of `config`."""

    def __init__(self, parts: Sequence[Transformer], config: Config, meshes: Meshes):
        self._own = Routers({layer: r for part in parts for layer, r in part.routers.items()}, meshes)
        self._pp = meshes.pp
        moe, n_layers = config.model.moe, config.model.n_layers
        self._layers = () if moe is None else tuple(range(moe.n_dense_layers, n_layers))
        self._columns = 0 if moe is None else moe.n_experts + 5

    def update(self, skip: Tensor) -> RouterReport | None:
        """As `Routers.update`. Collective: one all-reduce inside a stage, one between stages."""
        if not self._layers:
            return None
        own = self._own.update(skip)
        values = torch.zeros(len(self._layers), self._columns, dtype=torch.float64, device=skip.device)
        if own is not None:
            rows = [self._layers.index(layer) for layer in own.layers]
            for row, found in zip(rows, own.values, strict=True):
                values[row] = found
        dist.all_reduce(values, group=self._pp)
        return RouterReport(values, self._layers)

    def shards(self) -> list[Shard]:
        return self._own.shards()
