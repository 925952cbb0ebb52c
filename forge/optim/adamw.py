"""AdamW over shards, in one fused kernel per group, able to skip a step on the device.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019. The arithmetic is PyTorch's own
(torch.optim.adamw.adamw with fused=True). It runs on local shards instead of DTensors, so that one code path serves every
engine, and its moments exist from the start, so that loading a checkpoint writes into them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.adamw import adamw

from forge.config.schema import OptimizerConfig
from forge.optim.int8 import Int8Moments
from forge.optim.optimizer import gradient, register, update_groups, weight_decay, wide_dtype
from forge.optim.rounding import StochasticRounding
from forge.shard import Shard

# Parameters in a narrow dtype are updated through float32 copies, this many elements at a time, to bound their memory.
WIDENED_ELEMENTS = 1 << 26


@register("adamw")
class AdamW:
    """The update theta <- theta - lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * theta).

    Moments have the dtype promote(float32, storage), or bfloat16 or eight bits with stochastic rounding if
    `optimizer.moment_dtype` says so; arithmetic is always in promote(float32, storage). Names that match a glob of
    `optimizer.no_decay` are not decayed.
    """

    def __init__(self, shards: list[Shard], config: OptimizerConfig, group: ProcessGroup | None = None):
        self._config = config
        self._shards = shards
        self._groups = update_groups(shards, config, WIDENED_ELEMENTS)
        self._int8 = Int8Moments(shards, group) if config.moment_dtype == "int8" else None
        kept = [] if self._int8 is not None else shards
        self.exp_avg = {shard.name: self._moment(shard) for shard in kept}
        self.exp_avg_sq = {shard.name: self._moment(shard) for shard in kept}
        # The fused kernel advances one counter per parameter; they are views of one vector, so that one copy reads them all.
        device = shards[0].parameter.device
        self._steps = torch.zeros(len(shards), dtype=torch.float32, device=device)
        self._step_of = dict(zip((s.name for s in shards), self._steps.unbind(), strict=True))
        narrow = config.moment_dtype == "bfloat16"
        self._rounding = StochasticRounding(shards, ("exp_avg", "exp_avg_sq")) if narrow else None

    def step(self, lr: float, skip: Tensor) -> None:
        if self._rounding is not None:
            self._rounding.draw(self._steps.max())
        if self._int8 is not None:
            self._int8.draw(self._steps.max())
        for shards in self._groups:
            self._update(shards, lr, skip)
        if self._int8 is not None:
            self._int8.agree()

    def _moment(self, shard: Shard) -> Tensor:
        narrow = self._config.moment_dtype == "bfloat16"
        return torch.zeros_like(shard.data, dtype=torch.bfloat16 if narrow else wide_dtype(shard))

    def _update(self, shards: list[Shard], lr: float, skip: Tensor) -> None:
        rates = shards[0].rates
        states = [
            [shard.data for shard in shards],
            [gradient(shard) for shard in shards],
            self._moments(shards, "exp_avg"),
            self._moments(shards, "exp_avg_sq"),
        ]
        wide = wide_dtype(shards[0])
        params, grads, exp_avg, exp_avg_sq = (
            state if state[0].dtype == wide else [t.to(wide) for t in state] for state in states
        )
        adamw(
            params,
            grads,
            exp_avg,
            exp_avg_sq,
            [],
            [self._step_of[shard.name] for shard in shards],
            fused=True,
            found_inf=skip.to(params[0].device),
            amsgrad=False,
            beta1=self._config.betas[0],
            beta2=self._config.betas[1],
            lr=lr * rates.lr,
            weight_decay=weight_decay(shards[0].name, self._config) / rates.lr,
            eps=self._config.eps * rates.eps,
            maximize=False,
        )
        if states[0][0].dtype != wide:
            torch._foreach_copy_(states[0], params)
        for slot, narrow, widened in (("exp_avg", states[2], exp_avg), ("exp_avg_sq", states[3], exp_avg_sq)):
            for shard, into, values in zip(shards, narrow, widened, strict=True):
                if self._int8 is not None:
                    self._int8.write(shard, slot, values)
                elif self._rounding is not None:
                    self._rounding.copy_(into, values, shard, slot)

    def _moments(self, shards: list[Shard], slot: str) -> list[Tensor]:
        if self._int8 is not None:
            return [self._int8.read(shard, slot) for shard in shards]
        kept = self.exp_avg if slot == "exp_avg" else self.exp_avg_sq
        return [kept[shard.name] for shard in shards]

    def follow(self, config: OptimizerConfig) -> None:
        """From the next step on, use these values of weight_decay, betas and eps."""
        self._config = config

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        for shard in self._shards:
            if self._int8 is not None:
                yield from self._int8.tensors("exp_avg", shard)
                yield from self._int8.tensors("exp_avg_sq", shard)
                continue
            yield "exp_avg", shard, self.exp_avg[shard.name]
            yield "exp_avg_sq", shard, self.exp_avg_sq[shard.name]

    def state(self) -> dict[str, int]:
        """Return the number of updates, without skipped ones. Waits for the device."""
        # Counters of parameters of which this rank holds nothing stay 0; all others are equal.
        return {"updates": int(self._steps.max().item())}

    def load_state(self, state: dict[str, int]) -> None:
        self._steps.fill_(float(state["updates"]))
        if self._int8 is not None:
            self._int8.share_loaded()
