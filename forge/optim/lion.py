"""Lion: steps of constant size along the sign of averaged gradients, with half the state of AdamW.

Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023 (arXiv:2302.06675).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from forge.config.schema import OptimizerConfig
from forge.optim.moments import make_moments
from forge.optim.optimizer import gradient, weight_decay, wide_dtype, write_unless
from forge.shard import Shard


class Lion:
    """The update theta <- theta - lr * (sign(c) + weight_decay * theta), m <- beta2 m + (1 - beta2) g.

    c = beta1 m + (1 - beta1) g. Elements with |c| < `optimizer.eps` use c / eps in place of sign(c), because the sign
    of pure rounding noise would depend on the layout.

    m has the wider dtype of float32 and storage. If `optimizer.moment_dtype` is bfloat16, m is bfloat16 with stochastic
    rounding.
    """

    def __init__(self, shards: list[Shard], config: OptimizerConfig, group: ProcessGroup | None = None):
        self._config, self._shards = config, shards
        self._moments = make_moments(shards, ("momentum",), config, group)
        self._updates = torch.zeros((), dtype=torch.int64, device=shards[0].data.device)

    def step(self, lr: float, skip: Tensor) -> None:
        beta1, beta2 = self._config.betas
        self._moments.draw(self._updates)
        for shard in self._shards:
            wide = wide_dtype(shard)
            mean, weight = self._moments.read(shard, "momentum"), shard.data.to(wide)
            # In a skipped step, the mean itself takes the gradient's place, so the mean does not change.
            new = torch.where(skip > 0, mean, gradient(shard).to(wide))
            direction = mean.lerp(new, 1 - beta1).div_(self._config.eps * shard.rates.eps).clamp_(-1, 1)
            decay = weight_decay(shard.name, self._config) / shard.rates.lr
            rate = lr * shard.rates.scale * shard.rates.lr
            write_unless(skip, shard.data, weight - rate * (direction + decay * weight))
            mean.lerp_(new, 1 - beta2)
            self._moments.write(shard, "momentum", mean)
        self._moments.finish()
        write_unless(skip, self._updates, self._updates + 1)

    def follow(self, config: OptimizerConfig) -> None:
        """Use weight_decay, betas and eps of `config`, beginning with the next step."""
        self._config = config

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        return self._moments.tensors()

    def state(self) -> dict[str, int]:
        """Return the number of updates, not counting skipped steps. Synchronises with the device."""
        return {"updates": int(self._updates)}

    def load_state(self, state: dict[str, int]) -> None:
        self._updates.fill_(state["updates"])
        self._moments.share_loaded()
