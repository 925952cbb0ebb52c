"""Exponential moving average (EMA) of the weights, for any optimizer.

At a high learning rate the average has less noise than the weights. Polyak and Juditsky, "Acceleration of Stochastic
Approximation by Averaging", 1992, with exponential weights. The average is optimizer state, so checkpoints include it
and any layout can load it. `scripts/average.py --ema` exports it as weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from forge.config.schema import OptimizerConfig
from forge.optim.optimizer import Optimizer, wide_dtype
from forge.shard import Shard

SLOT = "ema"


class WithAverage:
    """Wraps an optimizer and updates the average e <- d e + (1 - d) theta after each update t, counted from 0.

    d is the smaller of `decay` and (1 + t) / (10 + t), so the initial weights do not dominate the average. The average
    has the wider dtype of float32 and storage. Skipped steps change nothing.
    """

    def __init__(self, inner: Optimizer, shards: Sequence[Shard], decay: float):
        self._inner, self._shards, self._decay = inner, shards, decay
        self._means = {s.name: s.data.to(wide_dtype(s), copy=True) for s in shards}
        self._updates = torch.zeros((), dtype=torch.float64, device=shards[0].data.device)

    def step(self, lr: float, skip: Tensor) -> None:
        self._inner.step(lr, skip)
        made = 1.0 - skip.to(self._updates)
        decay = ((1 + self._updates) / (10 + self._updates)).clamp(max=self._decay)
        share = (1.0 - decay) * made
        self._updates += made
        for shard in self._shards:
            mean = self._means[shard.name]
            mean.lerp_(shard.data.to(mean.dtype), share.to(mean.dtype))

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        yield from self._inner.tensors()
        for shard in self._shards:
            yield SLOT, shard, self._means[shard.name]

    def state(self) -> dict[str, Any]:
        return self._inner.state() | {"averaged": int(self._updates.item())}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`. If its key "averaged" is missing, start the average from the current weights."""
        self._inner.load_state({key: value for key, value in state.items() if key != "averaged"})
        self._updates.fill_(float(state.get("averaged", 0)))
        if "averaged" not in state:
            for shard in self._shards:
                self._means[shard.name].copy_(shard.data)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute `name` of the wrapped optimizer. The returned `follow` also sets the decay of the average."""
        found = getattr(self._inner, name)
        if name != "follow":
            return found

        def follow(config: OptimizerConfig) -> None:
            found(config)
            self._decay = config.ema

        return follow
