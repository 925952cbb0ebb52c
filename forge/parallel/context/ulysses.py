"""Context parallelism by exchanging heads (Jacobs et al. 2023, "DeepSpeed Ulysses").

Before attention, an all-to-all exchanges "all heads, part of the sequence" for "some heads, whole sequence". A second
all-to-all reverses the exchange afterwards. Backward makes two more. Attention itself is the same as in one process.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from forge.config.checks import divisors
from forge.model import AttentionMask
from forge.model.sdpa import SdpaAttention, sdpa_attention
from forge.parallel.context.sequence import SequenceSplit
from forge.runtime import compat
from forge.runtime.errors import UserError


class UlyssesAttention:
    """Attention over the whole sequence. Each rank computes 1 / cp of the heads, with the attention function `inner`.

    Calls are collective over the cp ranks. They raise UserError if cp does not divide the number of query heads. If cp
    does not divide the number of key/value heads, these are repeated, so every rank gets the key/value heads of its query
    heads.
    """

    def __init__(self, split: SequenceSplit, inner: SdpaAttention = sdpa_attention):
        self.split, self._inner = split, inner

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        # Only shape, dtype and device of x are used, so a view of the full length suffices; nothing is gathered.
        return self._inner.prepare(mask, x[:, :1].expand(-1, x.shape[1] * self.split.ranks, -1))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        ranks, heads = self.split.ranks, q.shape[1]
        if heads % ranks:  # the configuration's checks do not know the heads of a user's tp_plan
            raise UserError(
                f"parallel.cp = {ranks}: must divide the {heads} query heads of each rank, because parallel.context = "
                f"ulysses exchanges whole heads; use one of {divisors(heads)}, or set parallel.context = allgather or ring"
            )
        repeats = ranks // gcd(ranks, k.shape[1])
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        by_rank = [_features(x.unflatten(1, (ranks, -1)).movedim(1, 0)) for x in (q, k, v)]
        # [cp (the rank of this part of the sequence), batch, seq / cp, features of q, k and v heads]
        received = compat.all_to_all(torch.cat(by_rank, dim=-1), self.split.group)
        whole = self.split.in_order(received).split([part.shape[-1] for part in by_rank], dim=-1)
        q, k, v = (
            part.unflatten(-1, (-1, x.shape[-1])).transpose(1, 2)
            for part, x in zip(whole, (q, k, v), strict=True)
        )
        if sinks is not None:
            sinks = sinks.unflatten(0, (ranks, -1))[self.split.rank]
        out = self._inner(q, k, v, mask, sinks)
        # [cp (the rank of these heads), batch, heads / cp, seq / cp, v_dim]
        received = compat.all_to_all(self.split.by_rank(out), self.split.group)
        return received.movedim(0, 1).flatten(1, 2)


def _features(x: Tensor) -> Tensor:
    """`[..., heads, seq, head_dim]` -> `[..., seq, heads * head_dim]`."""
    return x.transpose(-3, -2).flatten(-2)
