"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

Details missing in the paper follow the authors' code.

The keys and values of all heads are projected from one small vector per token, the latent. The keys have a second part,
with RoPE, which all heads share. Generation caches only the latent and this part.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from forge.config.model import ModelConfig
from forge.model.attention import Attention, AttentionFunction, Shared, score_factor
from forge.model.flops import matrix_flops, mean_keys
from forge.model.norm import norm_of
from forge.model.sdpa import AttentionMask


class Down(nn.Linear):
    """A projection of the stream to features shared by all heads."""


class Up(nn.Linear):
    """A projection from features shared by all heads to features of each head."""


class Latents(nn.Module):
    """Returns the latent and the shared key part unchanged.

    An extension point: tensor parallelism replaces this module.
    """

    def forward(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """latent `[batch, seq, rank]`, key `[batch, seq, rope_dim]` -> both unchanged."""
        return latent, key


class LatentAttention(Attention):
    """Multi-head latent attention. In a query or key head, the elements without RoPE come first.

    An attention function may have a method `attend_latent(layer, q, latent, key, mask)`. The layer then calls this
    method with the latents `[batch, seq, rank]` and the rotated key part `[batch, seq, rope_dim]`, so the function can
    send or cache them.
    """

    def __init__(self, config: ModelConfig, window: int, rotation: int | None = 0):
        mla, heads, bias = config.latent, config.n_heads, config.attention_bias
        assert mla is not None
        qk_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        super().__init__(config, window, rotation, mla.v_head_dim, qk_dim)
        self.n_heads, self.rank, self.qk_dim = heads, mla.kv_lora_rank, qk_dim
        self.nope_dim, self.rope_dim = mla.qk_nope_head_dim, mla.qk_rope_head_dim
        self.factor *= score_factor(config.rope_scaling)
        self.wq = self.wq_a = self.q_norm = self.wq_b = None
        if mla.q_lora_rank:
            self.wq_a = Down(config.dim, mla.q_lora_rank, bias=bias)
            self.q_norm = norm_of(config, mla.q_lora_rank)
            self.wq_b = nn.Linear(mla.q_lora_rank, heads * self.qk_dim, bias=False)
        else:
            self.wq = nn.Linear(config.dim, heads * self.qk_dim, bias=False)
        self.wkv_a = Down(config.dim, self.rank + self.rope_dim, bias=bias)
        self.kv_norm = norm_of(config, self.rank)
        self.wkv_b = Up(self.rank, heads * (self.nope_dim + self.v_dim), bias=False)
        self.latents = Latents()
        self.wo = nn.Linear(heads * self.v_dim, config.dim, bias=config.attention_output_bias)
        self.heads = {"wq_b" if mla.q_lora_rank else "wq": heads, "wkv_b": heads}

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """x `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        q = self.queries(x, shared)
        latent, key = self.wkv_a(x).split([self.rank, self.rope_dim], dim=-1)
        latent, key = self.latents(self.kv_norm(latent), key)
        key = self.rotated(key.unsqueeze(2), shared).squeeze(2)
        mask, attend_latent = shared.masks[self.window], getattr(self.attend, "attend_latent", None)
        if attend_latent is not None:
            out = attend_latent(self, q, latent, key, mask)
        else:
            out = self.attend(q, *self.expand(latent, key), mask, self.sink_logits())
        return self.output(out, x)

    def queries(self, x: Tensor, shared: Shared) -> Tensor:
        """x `[batch, seq, dim]` -> queries `[batch, heads, seq, qk_dim]`, rotated and multiplied by `Attention.factor`."""
        if self.wq_a is None:
            assert self.wq is not None
            q = self.wq(x)
        else:
            assert self.q_norm is not None and self.wq_b is not None
            q = self.wq_b(self.q_norm(self.wq_a(x)))
        nope, rope = q.unflatten(-1, (-1, self.qk_dim)).split([self.nope_dim, self.rope_dim], dim=-1)
        q = torch.cat([nope, self.rotated(rope, shared)], dim=-1)
        return self.scaled(q).transpose(1, 2)

    def expand(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """latent `[batch, seq, rank]`, key `[batch, seq, rope_dim]` -> k and v `[batch, heads, seq, qk_dim or v_dim]`."""
        up = self.wkv_b(latent).unflatten(-1, (-1, self.nope_dim + self.v_dim))
        nope, v = up.split([self.nope_dim, self.v_dim], dim=-1)
        k = torch.cat([nope, key.unsqueeze(2).expand(-1, -1, nope.shape[2], -1)], dim=-1)
        return k.transpose(1, 2), v.transpose(1, 2)

    def absorbed(
        self, attend: AttentionFunction, q: Tensor, latent: Tensor, key: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Attend to the latents directly, as one key/value head. Efficient for few queries and many keys.

        q `[batch, heads, seq, qk_dim]`, latent `[batch, keys, rank]`, key `[batch, keys, rope_dim]` -> `[batch, heads,
        seq, v_dim]`. The projection from latents to keys is absorbed into the queries, and the projection from latents
        to values into the output (DeepSeek-V2, section 2.1.2).
        """
        weight = self.wkv_b.weight.to(q.dtype).unflatten(0, (-1, self.nope_dim + self.v_dim))
        up_k, up_v = weight.split([self.nope_dim, self.v_dim], dim=1)  # [heads, nope_dim or v_dim, rank]
        nope, rope = q.split([self.nope_dim, self.rope_dim], dim=-1)
        q = torch.cat([nope @ up_k, rope], dim=-1)
        # The attention function divides scores by the square root of the size of these longer heads; the model needs
        # sqrt(qk_dim).
        q = q * sqrt(q.shape[-1] / self.qk_dim)
        k, v = torch.cat([latent, key], dim=-1).unsqueeze(1), latent.unsqueeze(1)
        return attend(q, k, v, mask, self.sink_logits()) @ up_v.mT

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs per token: the projections, and two products with each visible key (score and value)."""
        scores = self.n_heads * (self.qk_dim + self.v_dim) * mean_keys(seq_len, self.window)
        return matrix_flops(self, seq_len) + 6 * scores
