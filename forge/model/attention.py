"""Grouped-query attention, and the attention function for a sequence that is whole in this process.

The attention function is an extension point: context parallelism replaces `Attention.attend` and leaves the rest.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from forge.config.model import ModelConfig
from forge.model.flops import matrix_flops, mean_keys
from forge.model.mask import AttentionMask, block_table, dense_table
from forge.model.norm import qk_norm_of
from forge.model.precision import promoted
from forge.model.rope import rotate


class Shared:
    """Inputs that all blocks of one forward share: RoPE's tables at its positions, and the mask of each window.

    cos, sin: `[tables, seq, 1, head_dim / 2]` or `[tables, batch, seq, 1, head_dim / 2]`, promote(float32, compute).
    masks: window (0: none) -> AttentionMask.
    labels: int64 `[batch, seq]`; tokens labelled IGNORE do not count in load balancing; None: all count.
    Not a dataclass, so that FSDP does not cast the tables (see AttentionMask).
    """

    def __init__(
        self, cos: Tensor, sin: Tensor, masks: dict[int, AttentionMask], labels: Tensor | None = None
    ):
        self.cos = cos
        self.sin = sin
        self.masks = masks
        self.labels = labels

    def with_labels(self, labels: Tensor) -> Shared:
        """Return the same inputs with other labels."""
        other = copy.copy(self)
        other.labels = labels
        return other


class AttentionFunction(Protocol):
    """Causal attention of one forward; the parameterless inner part of `Attention`."""

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        """Return the mask with its table, once per forward and window; x `[batch, seq, dim]` gives dtype, device, sizes."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """q `[batch, heads, seq, head_dim]`, k and v `[batch, kv_heads, seq, head_dim]` -> shaped like q."""


class Attention(nn.Module):
    """Projections, optional QK-norm, rotation, attention inside the layer's window, projection back.

    rotation: which of RoPE's tables; None: no positions.
    """

    def __init__(self, config: ModelConfig, window: int, rotation: int | None = 0):
        super().__init__()
        self.head_dim = config.head_dim
        self.heads = {"wq": config.n_heads, "wk": config.n_kv_heads, "wv": config.n_kv_heads}
        self.window, self.rotation = window, rotation
        self.q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, self.q_dim, bias=config.attention_bias)
        self.wk = nn.Linear(config.dim, kv_dim, bias=config.attention_bias)
        self.wv = nn.Linear(config.dim, kv_dim, bias=config.attention_bias)
        self.wo = nn.Linear(self.q_dim, config.dim, bias=config.attention_output_bias)
        self.q_norm = qk_norm_of(config, config.n_heads)
        self.k_norm = qk_norm_of(config, config.n_kv_heads)
        self.attend: AttentionFunction = sdpa_attention

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """x `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        # The number of heads follows from the projections: under tensor parallelism this rank has only some of them.
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # [batch, seq, heads, head_dim]
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))  # [batch, seq, kv_heads, head_dim]
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotation is not None:
            cos, sin = shared.cos[self.rotation], shared.sin[self.rotation]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), shared.masks[self.window])
        return self.wo(out.transpose(1, 2).flatten(2))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the operations of the projections and of two products with each key that a token sees."""
        return matrix_flops(self, seq_len) + 12 * self.q_dim * mean_keys(seq_len, self.window)


class SdpaAttention:
    """PyTorch's kernels: causal SDPA for a plain causal mask; otherwise flex_attention on CUDA, SDPA with a dense table
    elsewhere.

    float64 on CUDA uses the dense table too, because flex_attention does not support it.
    """

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        seq = x.shape[1]
        window = mask.window if mask.window < seq else 0
        if not window and mask.documents is None and not mask.soft_cap:
            return mask
        make_table = block_table if x.is_cuda and x.dtype != torch.float64 else dense_table
        table = make_table(window, mask.documents, seq, x.device)
        return AttentionMask(window, mask.documents, mask.soft_cap, table)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        if isinstance(mask.table, BlockMask):
            return flex_for(q.device.type)(
                q, k, v, score_mod=capped(mask.soft_cap), block_mask=mask.table, enable_gqa=True
            )
        if mask.soft_cap:
            assert mask.table is not None
            return _plain_attention(q, k, v, mask.table, mask.soft_cap)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.table, is_causal=mask.table is None, enable_gqa=True
        )


sdpa_attention = SdpaAttention()


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, soft_cap: float) -> Tensor:
    """Attention from its formula, for capped scores, which SDPA does not support; in promote(float32, q.dtype).

    q `[batch, heads, seq, head_dim]`, k, v `[batch, kv_heads, seq, head_dim]`, table bool `[batch, 1, seq, seq]`.
    """
    exact, repeats = promoted(q.dtype), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1).to(exact), v.repeat_interleave(repeats, dim=1).to(exact)
    scores = q.to(exact) @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = (soft_cap * torch.tanh(scores / soft_cap)).masked_fill(~table, -torch.inf)
    return (scores.softmax(-1) @ v).to(q.dtype)


@functools.cache
def flex_for(device_type: str) -> Callable[..., Tensor]:
    """flex_attention, compiled at first use on CUDA; eager (unfused) elsewhere."""
    attend: Callable[..., Tensor] = flex_attention
    return torch.compile(attend) if device_type == "cuda" else attend


@functools.cache
def capped(soft_cap: float) -> Callable[..., Tensor] | None:
    """flex's score_mod for a soft cap; one function object per value, so that flex compiles it once."""
    if not soft_cap:
        return None

    def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    return cap
