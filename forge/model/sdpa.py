"""The attention function for sequences that are whole on this process. Chooses PyTorch's kernel by mask and device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from forge.model.mask import AttentionMask, block_part, block_table, dense_part, dense_table
from forge.model.norm import promoted


class SdpaAttention:
    """Attention by PyTorch's kernels: causal SDPA for a plain causal mask, else flex_attention on CUDA.

    On a CPU, and for float64 (not supported by flex_attention), SDPA takes a dense table. SDPA has no soft cap and no
    sinks, so these are computed in plain operations instead.
    """

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        if mask.is_causal(x.shape[1]):
            return mask
        make_table = block_table if has_flex(x) else dense_table
        return mask.with_table(make_table(mask.window, mask.documents, x.shape[1], x.device))

    def prepare_part(self, mask: AttentionMask, queries: Tensor, keys: Tensor, x: Tensor) -> AttentionMask:
        """Return the mask with a table for some queries and keys of a sequence. queries, keys: positions, int64 `[n]`."""
        make_table = block_part if has_flex(x) else dense_part
        return mask.with_table(make_table(mask.window, mask.documents, queries, keys))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        if isinstance(mask.table, BlockMask):
            if sinks is None:
                attend = flex_for(q.device.type)
                return attend(
                    q, k, v, score_mod=capped(mask.soft_cap), block_mask=mask.table, enable_gqa=True
                )
            out, lse = flex_with_lse(q, k, v, mask.table, mask.soft_cap)
            # The sink acts as a key with a zero value. The sigmoid is the total softmax weight of all other keys.
            return out * torch.sigmoid(lse - sinks.to(lse.dtype)[:, None]).unsqueeze(-1).to(out.dtype)
        if mask.soft_cap or sinks is not None:
            assert mask.table is not None
            return _plain_attention(q, k, v, mask.table, mask.soft_cap, sinks)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.table, is_causal=mask.table is None, enable_gqa=True
        )


sdpa_attention = SdpaAttention()


def has_flex(x: Tensor) -> bool:
    """Return whether flex_attention has kernels for the device and dtype of `x`: CUDA, any dtype except float64."""
    return x.is_cuda and x.dtype != torch.float64


def _plain_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    """Compute attention in plain operations, in the wider of float32 and q's dtype.

    For soft caps and sinks, which SDPA does not support. Shapes as for `AttentionFunction`; table bool `[batch, 1, seq,
    keys]`.
    """
    exact, repeats = promoted(q.dtype), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1).to(exact), v.repeat_interleave(repeats, dim=1).to(exact)
    scores = q.to(exact) @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~table, -torch.inf)
    if sinks is not None:
        sink = sinks.to(exact).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        return (torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1] @ v).to(q.dtype)
    return (scores.softmax(-1) @ v).to(q.dtype)


def flex_with_lse(
    q: Tensor, k: Tensor, v: Tensor, table: BlockMask, soft_cap: float
) -> tuple[Tensor, Tensor]:
    """Return flex_attention's output, and the logsumexp of each row's scores, float32 `[batch, heads, seq]`."""
    attend = flex_for(q.device.type)
    aux = AuxRequest(lse=True)
    mod = capped(soft_cap)
    out, more = attend(q, k, v, score_mod=mod, block_mask=table, enable_gqa=True, return_aux=aux)
    return out, more.lse


_NARROWEST = 16
"""The fewest values per head that flex_attention's kernels for CUDA accept."""


@functools.cache
def flex_for(device_type: str) -> Callable[..., Any]:
    """Return flex_attention: compiled at first use on CUDA, eager (unfused) elsewhere."""
    return torch.compile(_flex) if device_type == "cuda" else _flex


def _flex(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Call flex_attention; heads narrower than `_NARROWEST` are padded with zeros, which change no score."""
    scale, width = 1 / math.sqrt(q.shape[-1]), v.shape[-1]
    q, k, v = (F.pad(x, (0, _NARROWEST - x.shape[-1])) if x.shape[-1] < _NARROWEST else x for x in (q, k, v))
    # Below 128 queries, PyTorch would choose its decoding kernel, whose tiles do not divide our blocks of 128.
    options |= {"scale": scale, "kernel_options": {"FORCE_USE_FLEX_ATTENTION": True}}
    found: Any = flex_attention(q, k, v, **options)
    if "return_aux" in options:
        return found[0][..., :width], found[1]
    return found[..., :width]


@functools.cache
def capped(soft_cap: float) -> Callable[..., Tensor] | None:
    """Return flex_attention's score_mod for a soft cap. None: no cap.

    Each cap has one function object, so flex_attention is compiled once per cap.
    """
    if not soft_cap:
        return None

    def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    return cap
