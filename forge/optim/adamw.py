"""AdamW over shards, with one fused kernel per group of shards. A flag on the device can skip a step.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019. The arithmetic is PyTorch's own
(torch.optim.adamw.adamw with fused=True). It runs on local shards, not on DTensors, so one code path serves every
engine. Moments are allocated at the start, so a checkpoint can be loaded into them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.adamw import adamw

from forge.config.schema import OptimizerConfig
from forge.optim.moments import make_moments
from forge.optim.optimizer import gradient, update_groups, weight_decay, wide_dtype
from forge.shard import Shard

# Parameters in a narrow dtype are updated through float32 copies. To bound memory, about this many elements are copied
# at a time.
WIDENED_ELEMENTS = 1 << 26


class AdamW:
    """The update theta <- theta - lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * theta).

    Arithmetic is in the wider dtype of float32 and storage. Moments have the same dtype by default. If
    `optimizer.moment_dtype` is bfloat16 or int8, moments have that format, with stochastic rounding. Parameters matching a
    glob of `optimizer.no_decay` have no weight decay.
    """

    def __init__(self, shards: list[Shard], config: OptimizerConfig, group: ProcessGroup | None = None):
        self._config = config
        self._groups = update_groups(shards, config, WIDENED_ELEMENTS)
        self.moments = make_moments(shards, ("exp_avg", "exp_avg_sq"), config, group)
        # The fused kernel advances one counter per parameter. The counters are views of one vector, so a single copy
        # reads them all.
        device = shards[0].parameter.device
        self._steps = torch.zeros(len(shards), dtype=torch.float32, device=device)
        self._step_of = dict(zip((s.name for s in shards), self._steps.unbind(), strict=True))

    def step(self, lr: float, skip: Tensor) -> None:
        self.moments.draw(self._steps)
        for shards in self._groups:
            self._update(shards, lr, skip)
        self.moments.finish()

    def _update(self, shards: list[Shard], lr: float, skip: Tensor) -> None:
        rates = shards[0].rates
        wide, data = wide_dtype(shards[0]), [shard.data for shard in shards]
        params, grads = (
            tensors if tensors[0].dtype == wide else [t.to(wide) for t in tensors]
            for tensors in (data, [gradient(shard) for shard in shards])
        )
        exp_avg, exp_avg_sq = (
            [self.moments.read(shard, slot) for shard in shards] for slot in ("exp_avg", "exp_avg_sq")
        )
        adamw(
            params,
            grads,
            exp_avg,
            exp_avg_sq,
            [],
            [self._step_of[shard.name] for shard in shards],
            fused=True,
            found_inf=skip,
            amsgrad=False,
            beta1=self._config.betas[0],
            beta2=self._config.betas[1],
            lr=lr * rates.scale * rates.lr,
            weight_decay=weight_decay(shards[0].name, self._config) / rates.lr,
            eps=self._config.eps * rates.eps,
            maximize=False,
        )
        if data[0].dtype != wide:
            torch._foreach_copy_(data, params)
        for slot, moments in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            for shard, moment in zip(shards, moments, strict=True):
                self.moments.write(shard, slot, moment)

    def follow(self, config: OptimizerConfig) -> None:
        """Use weight_decay, betas and eps of `config`, beginning with the next step."""
        self._config = config

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        return self.moments.tensors()

    def state(self) -> dict[str, int]:
        """Return the number of updates, not counting skipped steps. Synchronises with the device."""
        # Counters of parameters without elements on this rank stay 0; all others are equal.
        return {"updates": int(self._steps.max().item())}

    def load_state(self, state: dict[str, int]) -> None:
        self._steps.fill_(float(state["updates"]))
        self.moments.share_loaded()
