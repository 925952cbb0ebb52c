"""Context parallelism by gathering keys and values: during attention, every rank holds a layer's keys and values whole.

Forward makes one all-gather per layer, backward one reduce-scatter. Grouped-query attention keeps both messages small:
only key/value heads are sent (Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.model import AttentionMask, LatentAttention
from forge.model.sdpa import SdpaAttention, sdpa_attention
from forge.parallel.context.sequence import SequenceSplit
from forge.runtime import compat


class AllGatherAttention:
    """Attention of this rank's queries to the keys and values of the whole sequence, computed by `inner`.

    Calls are collective over the cp ranks: they gather keys and values.
    """

    def __init__(self, split: SequenceSplit, inner: SdpaAttention = sdpa_attention):
        self.split, self._inner = split, inner

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        seq = x.shape[1] * self.split.ranks
        if x.is_cuda and mask.is_causal(seq):
            # Built once per forward, outside compiled code: the compiler accepts such masks as arguments but cannot
            # trace their constructor.
            return mask.with_table(lower_right(self.split, x.shape[1]))
        queries, keys = self.split.indices(seq, x.device), torch.arange(seq, device=x.device)
        return self._inner.prepare_part(mask, queries, keys, x)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        k, v = self._whole(k, v)
        return self._attend(q, k, v, mask, sinks)

    def attend_latent(
        self, layer: LatentAttention, q: Tensor, latent: Tensor, key: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Gather the latents over the cp ranks, expand them, and attend.

        Collective. Latents are smaller than keys and values. Arguments and result as in
        `LatentAttention.attend_latent`.
        """
        k, v = layer.expand(*self._whole(latent, key))
        return self._attend(q, k, v, mask, layer.sink_logits())

    def _whole(self, *parts: Tensor) -> list[Tensor]:
        """All-gather `parts` over the cp ranks in one collective. Return the whole tensors.

        parts: each `[..., seq / cp, width]`. Results: each `[..., seq, width]`.
        """
        gathered = compat.all_gather(torch.cat(parts, dim=-1).unsqueeze(0), self.split.group)
        return list(self.split.in_order(gathered).split([part.shape[-1] for part in parts], dim=-1))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None) -> Tensor:
        if isinstance(mask.table, tuple):
            return causal_chunks(q, k, v, mask.table)
        return self._inner(q, k, v, mask, sinks)


def lower_right(split: SequenceSplit, tokens: int) -> tuple[Any, ...]:
    """Return two `CausalBias` masks, one for each chunk of this rank's queries. A mask covers all keys up to the chunk's end.

    tokens: number of tokens in both chunks together.
    """
    # This loads PyTorch's compiler, which takes most of a second, so only runs with context parallelism reach this
    # line.
    from torch.nn.attention.bias import causal_lower_right

    size = tokens // 2
    return tuple(causal_lower_right(size, (chunk + 1) * size) for chunk in split.chunks(split.rank))


def causal_chunks(q: Tensor, k: Tensor, v: Tensor, masks: tuple[Any, ...]) -> Tensor:
    """Compute plain causal attention of this rank's two chunks of queries. masks: from `lower_right`.

    q `[batch, heads, seq / cp, head_dim]`, k `[batch, kv_heads, seq, head_dim]`, v `[batch, kv_heads, seq, v_dim]` ->
    `[batch, heads, seq / cp, v_dim]`. CUDA only: FlashAttention implements this mask if head_dim = v_dim. Other
    backends, cuDNN included, would build the mask as a tensor in every call.
    """
    scale, v_dim = q.shape[-1] ** -0.5, v.shape[-1]
    if q.shape[-1] != v_dim:
        # Zero padding changes no score and no value. The only kernel for unequal sizes is far slower.
        width = max(q.shape[-1], v_dim)
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    outs = [
        F.scaled_dot_product_attention(
            queries,
            k[:, :, : mask.seq_len_kv],
            v[:, :, : mask.seq_len_kv],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        for queries, mask in zip(q.chunk(2, dim=2), masks, strict=True)
    ]
    return torch.cat(outs, dim=2)[..., :v_dim]
