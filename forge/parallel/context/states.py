"""Context parallelism of linear attention: ranks exchange states of the recurrence, not keys and values.

Consecutive tokens act on the state as one affine map (forge/model/delta_rule.py). Each rank computes the maps of its
two chunks by applying the recurrence to an identity and to an empty state. One all-gather sends the maps of all 2 * cp
chunks to every rank. Composing the maps of earlier chunks gives each chunk's initial state. The convolution needs the
last few tokens before each chunk; a second, small all-gather sends them.

The kernels of flash-linear-attention (fla) compute the last state from a given initial state. So they run twice: once
to get the maps, and once to get the outputs from the initial states. fla's own context parallelism cannot be used,
because it needs consecutive tokens on each rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.model import AttentionMask
from forge.model.delta_rule import affine_scan, divide, outputs
from forge.model.fused_delta_rule import fused_delta_rule, is_for_kernels
from forge.model.linear_attention import ages, causal_convolution
from forge.parallel.context.sequence import SequenceSplit
from forge.runtime import compat


class PassedStates:
    """A `Recurrence` on this rank's two chunks. Each chunk starts from the state after all earlier tokens of the sequence.

    Calls are collective over the cp ranks.
    """

    def __init__(self, split: SequenceSplit):
        self.split = split

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        table = None if mask.documents is None else self.split.part(ages(mask.documents))
        return AttentionMask(mask.window, mask.documents, table=table)

    def convolve(self, x: Tensor, weight: Tensor, mask: AttentionMask) -> Tensor:
        before = self._before(x, weight.shape[1] - 1)
        padded = torch.cat([before, _halves(x)], dim=1)
        age = None if mask.table is None else _halves(mask.table)
        return causal_convolution(padded, weight, age).view_as(x)

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, mask: AttentionMask, size: int
    ) -> Tensor:
        q, k, values, log_decay, beta = (_halves(x) for x in (q, k, v, log_decay, beta))
        resets = None if mask.table is None else _halves(mask.table) == 0
        key_dim = k.shape[-1]
        # The identity, followed by an empty state in the last dimension: `[2 batch, heads, key_dim, key_dim +
        # value_dim]`.
        unit = torch.eye(key_dim, key_dim + v.shape[-1], dtype=k.dtype, device=k.device)
        unit = unit.expand(k.shape[0], k.shape[2], -1, -1)
        if is_for_kernels(k, v, log_decay):
            # The identity's columns get values of 0, so the last state holds the images of the identity and of the
            # empty state.
            wide = F.pad(values, (key_dim, 0))
            _, maps = fused_delta_rule(q, k, wide, log_decay, beta, resets, unit.contiguous())
            entering = self._entering(maps)
            return fused_delta_rule(q, k, values, log_decay, beta, resets, entering)[0].reshape(v.shape)
        chunks = divide(q, k, values.to(q.dtype), log_decay, beta, resets, size)
        # [chunks + 1, ...]: images of the identity and of the empty state.
        maps = affine_scan(chunks.transition, F.pad(chunks.addition, (key_dim, 0)), unit)
        states = _apply(maps[:-1], self._entering(maps[-1]))
        return outputs(chunks, states, q.shape[1]).reshape(v.shape)

    def _before(self, x: Tensor, tokens: int) -> Tensor:
        """Return the `tokens` tokens before each of this rank's chunks, `[2 batch, tokens, channels]`.

        Positions before the sequence are zeros. Collective. x `[batch, seq / cp, channels]`.
        """
        ends = x.unflatten(1, (2, -1))[:, :, max(0, x.shape[1] // 2 - tokens) :]
        # A chunk shorter than the window is sent whole, and the window then spans several chunks.
        each = ends.shape[2]
        gathered = compat.all_gather(ends.flatten(1, 2).unsqueeze(0), self.split.group)
        whole = F.pad(self.split.in_order(gathered), (0, 0, tokens, 0))
        chunks = self.split.chunks(self.split.rank)
        return torch.stack([whole[:, c * each : c * each + tokens] for c in chunks], dim=1).flatten(0, 1)

    def _entering(self, maps: Tensor) -> Tensor:
        """Return the initial state of each of this rank's chunks, `[2 batch, heads, key_dim, value_dim]`.

        Collective. maps `[2 batch, heads, key_dim, key_dim + value_dim]`: the affine map of each chunk, i.e.
        the transition `[key_dim, key_dim]` and the addition `[key_dim, value_dim]`, concatenated.
        """
        flat = maps.unflatten(0, (-1, 2)).flatten(2)  # [batch, 2, ...]
        gathered = compat.all_gather(flat.unsqueeze(0), self.split.group)
        ordered = self.split.in_order(gathered).unflatten(-1, maps.shape[1:]).movedim(1, 0)[:-1]
        transition, addition = ordered.split([maps.shape[-2], maps.shape[-1] - maps.shape[-2]], dim=-1)
        states = affine_scan(transition, addition, torch.zeros_like(addition[0]))
        return torch.stack([states[chunk] for chunk in self.split.chunks(self.split.rank)], dim=1).flatten(
            0, 1
        )


def _halves(x: Tensor) -> Tensor:
    """Split each sequence into its two chunks: `[batch, seq / cp, ...]` -> `[2 batch, seq / 2 cp, ...]`."""
    return x.reshape(2 * x.shape[0], x.shape[1] // 2, *x.shape[2:])


def _apply(maps: Tensor, state: Tensor) -> Tensor:
    """Apply maps `[..., key_dim, key_dim + value_dim]` to the state `[..., key_dim, value_dim]`. Return the new state."""
    transition, addition = maps.split([state.shape[-2], state.shape[-1]], dim=-1)
    return transition @ state + addition
