"""Linear attention: Gated DeltaNet and Kimi Delta Attention.

Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) has the projections and gates of Qwen3-Next, with one decay per
head. Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692) has a decay for each key channel of a head; low-rank
projections compute decays and gates.

In place of attention over all keys, each head has a state of fixed size. Tokens decay, correct and read the state
(forge/model/delta_rule.py). A layer's work is therefore linear in the sequence. Queries, keys and values first pass a short
causal convolution along the sequence; the output is normalised and gated. There is no position embedding: the
recurrence itself depends on the order of the tokens.

Only the convolution and the recurrence look across tokens. These two operations are an extension point: context
parallelism and the generation cache replace only `LinearAttention.attend`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge.config.model import ModelConfig
from forge.model.attention import Shared
from forge.model.delta_rule import chunked_delta_rule
from forge.model.flops import matrix_flops
from forge.model.fused_delta_rule import fused_delta_rule, is_for_kernels
from forge.model.initial import Uniform
from forge.model.mla import Up
from forge.model.norm import RMSNorm, promoted
from forge.model.sdpa import AttentionMask

# `AttentionMask.window` of linear-attention layers. Layers with the same window share a mask.
LINEAR = -1
# Added to the squared length of queries and keys when they are divided by their length.
NORM_EPS = 1e-6


class Recurrence(Protocol):
    """The parameterless inner part of `LinearAttention`: all operations across tokens."""

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        """Return the mask with the table that the recurrence needs.

        Called once per forward. The table is the age of every token (see `ages`), or None if each sequence is one
        document. Only dtype, device and sizes of x `[batch, seq, dim]` are used.
        """

    def convolve(self, x: Tensor, weight: Tensor, mask: AttentionMask) -> Tensor:
        """Convolve x `[batch, seq, channels]` with weight `[channels, size]`; the result is shaped like x.

        The last element of the weight multiplies the token itself.
        """

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, mask: AttentionMask, size: int
    ) -> Tensor:
        """Run the recurrence over the tokens. Return, for each token and head, the vector read from the head's state.

        q, k `[batch, seq, heads, key_dim]`, v `[..., value_dim]`, beta `[batch, seq, heads]`, log_decay `[..., 1 or
        key_dim]`. The result has the shape of v. size: tokens per chunk.

        v is in the compute dtype, all other inputs are in the wider of float32 and the compute dtype. The result may be
        in either dtype.
        """


class Narrow(nn.Linear):
    """The first half of a low-rank projection, to features shared by all heads. `Up` is the second half."""


class LinearAttention(nn.Module):
    """Linear attention: projections, convolution, the gated delta rule, gated norm, output projection."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        chosen = config.linear_attention
        assert chosen is not None
        self.window = LINEAR
        self.key_dim, self.value_dim, self.chunk_size = (
            chosen.key_head_dim,
            chosen.value_head_dim,
            chosen.chunk_size,
        )
        n_keys, n_values = chosen.n_key_heads, chosen.n_value_heads
        self.heads = {"wq": n_keys, "wk": n_keys, "wv": n_values}
        keys, values = n_keys * self.key_dim, n_values * self.value_dim
        self.wq = nn.Linear(config.dim, keys, bias=False)
        self.wk = nn.Linear(config.dim, keys, bias=False)
        self.wv = nn.Linear(config.dim, values, bias=False)
        finer = chosen.kind == "kimi_delta"
        channels, self.gate = self.key_dim if finer else 1, torch.sigmoid if finer else F.silu
        narrow_gate = finer and not chosen.full_rank_gate
        self.wg_down, self.wg = _projection(config.dim, values, self.value_dim if narrow_gate else 0)
        self.wa_down, self.wa = _projection(config.dim, n_values * channels, self.key_dim if finer else 0)
        self.wb = nn.Linear(config.dim, n_values, bias=False)
        self.conv = ShortConvolution(keys, values, chosen.conv_size)
        self.decay = Decay(n_values, channels, chosen.decay_bound if finer else 0.0)
        self.out_norm = RMSNorm(self.value_dim, config.norm_eps)
        self.wo = nn.Linear(values, config.dim, bias=False)
        self.attend: Recurrence = local_recurrence

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """x `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        mask = shared.masks[self.window]
        q, k, v = self.conv(self.wq(x), self.wk(x), self.wv(x), self.attend.convolve, mask)
        log_decay = self.decay(self.wa(self.wa_down(x)))
        beta = self.wb(x).to(log_decay.dtype).sigmoid()
        exact = promoted(v.dtype)
        q, k = (_unit(part.to(exact).unflatten(-1, (-1, self.key_dim))) for part in (q, k))
        values = v.unflatten(-1, (-1, self.value_dim))
        # A key head serves consecutive value heads. Under tensor parallelism each rank has only some of the key and
        # value heads.
        repeats = values.shape[2] // k.shape[2]
        q, k = (part.repeat_interleave(repeats, dim=2) for part in (q * self.key_dim**-0.5, k))
        out = self.attend.recur(q, k, values, log_decay, beta, mask, self.chunk_size).to(v.dtype)
        gate = self.wg(self.wg_down(x)).unflatten(-1, (-1, self.value_dim))
        return self.wo((self.out_norm(out) * self.gate(gate)).flatten(2))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs per token: the projections, and three products with the state (read, correct, read again).

        These are the FLOPs of the token-by-token recurrence. The additional FLOPs of computing in chunks are not
        counted.
        """
        return matrix_flops(self, seq_len) + 18 * self.heads["wv"] * self.key_dim * self.value_dim


def _projection(dim: int, features: int, rank: int) -> tuple[nn.Module, nn.Linear]:
    """Return both halves of a low-rank projection through `rank` features; rank 0: an identity and a full projection."""
    if rank:
        return Narrow(dim, rank, bias=False), Up(rank, features, bias=False)
    return nn.Identity(), nn.Linear(dim, features, bias=False)


class ShortConvolution(nn.Module):
    """silu of a causal, depthwise convolution along the sequence; weights `[channels, size]`."""

    def __init__(self, keys: int, values: int, size: int):
        super().__init__()
        self.q = nn.Parameter(torch.empty(keys, size))
        self.k = nn.Parameter(torch.empty(keys, size))
        self.v = nn.Parameter(torch.empty(values, size))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, convolve: Callable[..., Tensor], mask: AttentionMask
    ) -> list[Tensor]:
        """q, k `[batch, seq, keys]`, v `[batch, seq, values]` -> the same shapes. convolve: `Recurrence.convolve`."""
        mixed = convolve(torch.cat([q, k, v], dim=-1), torch.cat(self.weights()), mask)
        return list(F.silu(mixed).split([x.shape[-1] for x in (q, k, v)], dim=-1))

    def weights(self) -> list[Tensor]:
        """Return the weights of queries, keys and values; tensor parallelism overrides this method."""
        return [self.q, self.k, self.v]

    def initial_value(self, name: str) -> Uniform:
        """Return PyTorch's initial distribution of a depthwise convolution of this size."""
        return Uniform(-(self.q.shape[1] ** -0.5), self.q.shape[1] ** -0.5)


class Decay(nn.Module):
    """Computes log decays of each head: -exp(a_log) softplus(a + dt_bias), in the wider of float32 and the compute dtype.

    As in Mamba 2 (Dao and Gu 2024, "Transformers are SSMs"), exp(a_log) is a rate, one per head, and the softplus is a
    time step, `channels` per head. With a bound, as in Kimi K3 (2607.24653), log decays are -bound sigmoid(exp(a_log)
    (a + dt_bias)).
    """

    exact_output = True

    def __init__(self, heads: int, channels: int, bound: float = 0.0):
        super().__init__()
        self.channels, self.bound = channels, bound
        self.a_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * channels))

    def forward(self, a: Tensor) -> Tensor:
        """Return the log decays `[batch, seq, heads, channels]`, at most 0. a `[batch, seq, heads * channels]`."""
        exact = promoted(a.dtype)
        a_log, dt_bias = (weight.to(exact) for weight in self.weights())
        sums, rates = (a.to(exact) + dt_bias).unflatten(-1, (-1, self.channels)), a_log.exp().unsqueeze(-1)
        return -self.bound * torch.sigmoid(rates * sums) if self.bound else -rates * F.softplus(sums)

    def weights(self) -> list[Tensor]:
        """Return a_log and dt_bias; tensor parallelism overrides this method."""
        return [self.a_log, self.dt_bias]

    def initial_value(self, name: str) -> float | Uniform:
        """Return the initial distribution of `name`.

        For decays per head, the values are Qwen3-Next's: rates from 0.01 to 16, time steps of softplus(1). For decays
        per channel, the values are Mamba 2's, as in Kimi Linear: rates from 1 to 16, time steps from 0.001 to 0.1. With
        a bound, dt_bias is 0, the middle of the sigmoid.
        """
        if self.channels == 1:
            return Uniform(0.01, 16.0, torch.log) if name == "a_log" else 1.0
        if name == "a_log":
            return Uniform(1.0, 16.0, torch.log)
        if self.bound:
            return 0.0
        return Uniform(log(0.001), log(0.1), lambda logs: logs.exp().expm1().log())  # the inverse of softplus


class LocalRecurrence:
    """Convolution and recurrence of sequences that are whole on this process."""

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        table = None if mask.documents is None else ages(mask.documents)
        return AttentionMask(mask.window, mask.documents, table=table)

    def convolve(self, x: Tensor, weight: Tensor, mask: AttentionMask) -> Tensor:
        return causal_convolution(F.pad(x, (0, 0, weight.shape[1] - 1, 0)), weight, mask.table)

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, mask: AttentionMask, size: int
    ) -> Tensor:
        resets = None if mask.table is None else mask.table == 0
        if is_for_kernels(k, v, log_decay):
            return fused_delta_rule(q, k, v, log_decay, beta, resets)[0]
        return chunked_delta_rule(q, k, v.to(q.dtype), log_decay, beta, resets, size)[0]


local_recurrence = LocalRecurrence()


def ages(documents: Tensor) -> Tensor:
    """Return, for each token, the number of earlier tokens in its document: int64 `[batch, seq]`.

    documents: int `[batch, seq]`; a document ends where the number changes.
    """
    index = torch.arange(documents.shape[1], device=documents.device)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return index - (index * begins).cummax(dim=1).values


def causal_convolution(x: Tensor, weight: Tensor, age: Tensor | None) -> Tensor:
    """Convolve along the sequence, each channel separately, within documents.

    x `[batch, size - 1 + seq, channels]`, beginning with the size - 1 tokens before the sequence; weight
    `[channels, size]`; age `[batch, seq]` from `ages` -> `[batch, seq, channels]`. Sums are in the wider of float32 and
    x's dtype.
    """
    size, exact = weight.shape[1], promoted(x.dtype)
    seq = x.shape[1] - size + 1
    taps = weight.to(exact).unbind(1)
    out = x[:, size - 1 :].to(exact) * taps[size - 1]
    for back in range(1, size):
        product = x[:, size - 1 - back : size - 1 - back + seq].to(exact) * taps[size - 1 - back]
        out = out + (product if age is None else product.masked_fill((age < back).unsqueeze(-1), 0.0))
    return out.to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    """Return x `[..., key_dim]` divided by its L2 norm."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
