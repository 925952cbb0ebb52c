"""AdamW over shards, in one fused kernel per group, able to skip a step on the device.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019. The arithmetic is PyTorch's own
(torch.optim.adamw.adamw with fused=True); this file decides what it runs on: local shards instead of DTensors, so that
one code path serves every engine, and moments that exist from the start, so that loading a checkpoint writes into them.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from forge.config import Config
from forge.shard import Shard

# Parameters in a narrow dtype are updated through float32 copies, this many elements at a time, to bound their memory.
WIDENED_ELEMENTS = 1 << 26


class AdamW:
    """The update theta <- theta - lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * theta).

    Moments have the dtype promote(float32, storage), or bfloat16 if `optimizer.moment_dtype` says so; arithmetic is
    always in promote(float32, storage). Names that match a glob of `optimizer.no_decay` are not decayed.
    """

    def __init__(self, shards: list[Shard], config: Config):
        self._config = config.optimizer
        self._shards = shards
        self._chunks = [
            (self._config.weight_decay if decayed else 0.0, chunk)
            for decayed in (True, False)
            for chunk in _chunks([s for s in shards if s.boxes and self._decays(s.name) is decayed])
        ]
        self.exp_avg = {shard.name: self._moment(shard) for shard in shards}
        self.exp_avg_sq = {shard.name: self._moment(shard) for shard in shards}
        # One counter per parameter because the fused kernel advances each, as views of one vector that can be read at once.
        device = shards[0].parameter.device
        self._steps = torch.zeros(len(shards), dtype=torch.float32, device=device)
        self._step_of = dict(zip((s.name for s in shards), self._steps.unbind(), strict=True))

    def step(self, lr: float, skip: Tensor) -> None:
        """One update with the shards' gradients. Where the device scalar `skip` is 1.0 nothing changes, counters included."""
        for weight_decay, chunk in self._chunks:
            self._update(chunk, lr, weight_decay, skip)

    def _moment(self, shard: Shard) -> Tensor:
        narrow = self._config.moment_dtype == "bfloat16"
        dtype = torch.bfloat16 if narrow else torch.promote_types(torch.float32, shard.parameter.dtype)
        return torch.zeros_like(shard.data, dtype=dtype)

    def _decays(self, name: str) -> bool:
        return not any(fnmatchcase(name, pattern) for pattern in self._config.no_decay)

    def _update(self, shards: list[Shard], lr: float, weight_decay: float, skip: Tensor) -> None:
        states = [
            [shard.data for shard in shards],
            [_gradient(shard) for shard in shards],
            [self.exp_avg[shard.name] for shard in shards],
            [self.exp_avg_sq[shard.name] for shard in shards],
        ]
        wide = torch.promote_types(torch.float32, states[0][0].dtype)
        params, grads, exp_avg, exp_avg_sq = ([t.to(wide) for t in state] for state in states)
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
            lr=lr,
            weight_decay=weight_decay,
            eps=self._config.eps,
            maximize=False,
        )
        for narrow, widened in ((states[0], params), (states[2], exp_avg), (states[3], exp_avg_sq)):
            if narrow[0].dtype != wide:
                torch._foreach_copy_(narrow, widened)

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """(slot, shard, values) of all state with one value per parameter element, for checkpoints and memory reports."""
        for shard in self._shards:
            yield "exp_avg", shard, self.exp_avg[shard.name]
            yield "exp_avg_sq", shard, self.exp_avg_sq[shard.name]

    def state(self) -> dict[str, int]:
        """The rest of the state: how many updates were made (skipped ones not counted). Waits for the device."""
        # A parameter of which this rank holds nothing is never updated here; the others count alike.
        return {"updates": int(self._steps.max().item())}

    def load_state(self, state: dict[str, int]) -> None:
        """Restore what `state` returned; the moments are loaded in place through `tensors`."""
        self._steps.fill_(float(state["updates"]))


def _gradient(shard: Shard) -> Tensor:
    grad = shard.grad
    return torch.zeros_like(shard.data) if grad is None else grad


def _chunks(shards: list[Shard]) -> Iterator[list[Shard]]:
    chunk: list[Shard] = []
    elements = 0
    for shard in shards:
        chunk.append(shard)
        elements += shard.data.numel()
        if elements >= WIDENED_ELEMENTS:
            yield chunk
            chunk, elements = [], 0
    if chunk:
        yield chunk
