"""Grouped-query attention, the base class of other kinds of attention, and rotary position embedding (RoPE).

The attention function is an extension point: context parallelism replaces only `Attention.attend`.
"""

from __future__ import annotations

import copy
from math import ceil, floor, log, pi, sqrt
from typing import Protocol

import torch
from torch import Tensor, nn

from forge.config.model import ModelConfig, RopeScalingConfig
from forge.model.flops import matrix_flops, mean_keys
from forge.model.norm import promoted, qk_norm_of
from forge.model.sdpa import AttentionMask, sdpa_attention


class Shared:
    """Inputs shared by all blocks in one forward: RoPE's tables and the mask of each window.

    cos, sin: `[tables, seq, 1, head_dim / 2]` or `[tables, batch, seq, 1, head_dim / 2]`, in the wider of float32 and
    the compute dtype. masks: window (0: none) -> AttentionMask. labels: int64 `[batch, seq]`; tokens labelled IGNORE do
    not count in load balancing; None: all tokens count. saved: with attention residuals, the streams saved by earlier
    layers, each shaped like a block's input.

    Not a dataclass, so FSDP does not cast the tables (see AttentionMask).
    """

    def __init__(
        self, cos: Tensor, sin: Tensor, masks: dict[int, AttentionMask], labels: Tensor | None = None
    ):
        self.cos = cos
        self.sin = sin
        self.masks = masks
        self.labels = labels
        self.saved: tuple[Tensor, ...] = ()

    def with_saved(self, *streams: Tensor) -> Shared:
        """Return a copy with `streams` added to the saved streams."""
        other = copy.copy(self)
        other.saved = (*self.saved, *streams)
        return other

    def with_labels(self, labels: Tensor) -> Shared:
        """Return a copy whose labels are `labels`."""
        other = copy.copy(self)
        other.labels = labels
        return other


class AttentionFunction(Protocol):
    """The parameterless inner part of `Attention`: a function of queries, keys, values and mask."""

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        """Return the mask with the `table` that this attention function needs.

        Called once per forward and window. Only dtype, device and sizes of x `[batch, seq, dim]` are used.
        """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend: q `[batch, heads, seq, head_dim]`, k and v `[batch, kv_heads, seq, head_dim or v_dim]`.

        Returns `[batch, heads, seq, v_dim]`. sinks `[heads]`, given if mask.sinks: one extra logit per head in the
        softmax, with a value vector of zero.
        """


class Attention(nn.Module):
    """The base class of every kind of attention. It has the attention function, output projection, gate and sinks.

    rotation: index of RoPE's tables; None: no RoPE. qk_dim: size of a query head; every attention function divides
    scores by sqrt(qk_dim). factor: multiplies the queries, for models that divide scores by another number.
    """

    wo: nn.Linear

    def __init__(self, config: ModelConfig, window: int, rotation: int | None, v_dim: int, qk_dim: int):
        super().__init__()
        self.factor = sqrt(qk_dim / (config.attention_scale_dim or qk_dim))
        self.window, self.rotation, self.v_dim = window, rotation, v_dim
        self.attend: AttentionFunction = sdpa_attention
        gates = {"none": 0, "head": config.n_heads, "element": config.n_heads * v_dim}[config.attention_gate]
        self.wg = nn.Linear(config.dim, gates, bias=False) if gates else None
        self.sinks = Sinks(config.n_heads) if config.attention_sinks else None

    def output(self, out: Tensor, x: Tensor) -> Tensor:
        """Gate and project out `[batch, heads, seq, v_dim]` to `[batch, seq, dim]`.

        x: the layer's input `[batch, seq, dim]`, for the gate.
        """
        out = out.transpose(1, 2)
        if self.wg is not None:
            out = out * self.wg(x).unflatten(-1, (out.shape[2], -1)).sigmoid()
        return self.wo(out.flatten(2))

    def sink_logits(self) -> Tensor | None:
        """Return the logits of the sinks, `[heads]`; None without sinks."""
        return None if self.sinks is None else self.sinks()

    def scaled(self, q: Tensor) -> Tensor:
        """Return the queries multiplied by `factor`."""
        return q if self.factor == 1.0 else q * self.factor

    def rotated(self, x: Tensor, shared: Shared) -> Tensor:
        """Apply RoPE to x `[batch, seq, heads, head_dim]`. Returns x itself in a layer without RoPE."""
        if self.rotation is None:
            return x
        return rotate(x, shared.cos[self.rotation], shared.sin[self.rotation])


class GroupedAttention(Attention):
    """Grouped-query attention: projections, optional QK-norm, RoPE, attention within the layer's window."""

    def __init__(self, config: ModelConfig, window: int, rotation: int | None = 0):
        super().__init__(config, window, rotation, config.head_dim, config.head_dim)
        self.head_dim = config.head_dim
        self.q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, self.q_dim, bias=config.attention_bias)
        self.wk = nn.Linear(config.dim, kv_dim, bias=config.attention_bias)
        self.wv = nn.Linear(config.dim, kv_dim, bias=config.attention_bias)
        self.wo = nn.Linear(self.q_dim, config.dim, bias=config.attention_output_bias)
        self.q_norm = qk_norm_of(config, config.n_heads)
        self.k_norm = qk_norm_of(config, config.n_kv_heads)
        self.heads = {"wq": config.n_heads, "wk": config.n_kv_heads, "wv": config.n_kv_heads}

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """x `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        # The number of heads follows from the projections, because under tensor parallelism each rank has only some
        # heads.
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # [batch, seq, heads, head_dim]
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))  # [batch, seq, kv_heads, head_dim]
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (
            part.transpose(1, 2)
            for part in (self.scaled(self.rotated(q, shared)), self.rotated(k, shared), v)
        )
        return self.output(self.attend(q, k, v, shared.masks[self.window], self.sink_logits()), x)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs per token: the projections, and two products with each visible key (its score and its value)."""
        return matrix_flops(self, seq_len) + 12 * self.q_dim * mean_keys(seq_len, self.window)


class HeadIndices(nn.Module):
    """The global indices of this process's heads, for per-head constants, e.g. ALiBi slopes.

    Tensor parallelism divides `heads` if the tensor-parallel plan makes the module colwise.
    """

    def __init__(self, heads: int):
        super().__init__()
        self.heads = range(heads)

    def forward(self, device: torch.device) -> Tensor:
        """Return the indices, int64 `[heads]`; under tensor parallelism `[heads / tp]`."""
        return torch.arange(self.heads.start, self.heads.stop, device=device)


class Sinks(nn.Module):
    """Attention sinks: one learned logit per head, added to the softmax as in gpt-oss.

    After Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks".
    """

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self) -> Tensor:
        """Return the sink logits, `[heads]`."""
        return self.weight


# Rotary position embedding, with linear frequency scaling and the scalings of Llama 3 and YaRN.
#
# Half rotation: element i of a head forms a pair with element i + rope_dim/2, as in transformers. Su et al. 2021
# ("RoFormer") pair neighbours. The two are equivalent up to a permutation of each head's elements.


def rope_tables(config: ModelConfig, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles: two float64 CPU tensors `[tables, seq_len, rope_dim / 2]`.

    If `config.sliding_rope_theta` is set, there is a second table for sliding-window layers, with this theta and
    without scaling. Both tensors include YaRN's attention factor, so attention scores are multiplied by the square of
    the factor.
    """
    bases = [(config.rope_theta, config.rope_scaling)]
    if config.sliding_rope_theta:
        bases.append((config.sliding_rope_theta, None))
    positions = torch.arange(seq_len, dtype=torch.float64, device="cpu")
    angles = torch.stack([torch.outer(positions, rope_frequencies(config.rope_dim, *base)) for base in bases])
    scales = torch.tensor(
        [attention_factor(scaling) for _, scaling in bases], dtype=torch.float64, device="cpu"
    )
    return angles.cos() * scales.view(-1, 1, 1), angles.sin() * scales.view(-1, 1, 1)


def rope_frequencies(dim: int, theta: float, scaling: RopeScalingConfig | None) -> Tensor:
    """Return each pair's rotation in radians per position, after `scaling`: float64 CPU `[dim / 2]`."""
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if scaling is None:
        return frequencies
    if (
        scaling.kind == "linear"
    ):  # Chen et al. 2023, "Extending Context Window ... via Positional Interpolation"
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    return _yarn(frequencies, scaling, theta)


def attention_factor(scaling: RopeScalingConfig | None) -> float:
    """Return YaRN's factor on queries and keys: `attention_factor` if set, else 0.1 ln(factor) + 1; 1 without YaRN."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * log(scaling.factor) + 1.0 if scaling.factor > 1.0 else 1.0


def score_factor(scaling: RopeScalingConfig | None) -> float:
    """Return the factor of `mscale_all_dim` on attention scores; 1 without YaRN (DeepSeek-V2's code, `yarn_get_mscale`)."""
    if scaling is None or scaling.kind != "yarn" or scaling.factor <= 1.0:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * log(scaling.factor) + 1.0) ** 2


def _llama3(frequencies: Tensor, scaling: RopeScalingConfig) -> Tensor:
    """Scale frequencies like Llama 3.1 (Meta's llama-models, `apply_scaling`).

    High frequencies are kept; low frequencies are divided by `factor`. Between low_freq_factor and high_freq_factor
    rotations over the original context, kept and divided values are interpolated linearly in the number of rotations.
    """
    rotations = scaling.original_max_position * frequencies / (2 * pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((rotations - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, scaling: RopeScalingConfig, theta: float) -> Tensor:
    """YaRN (Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models").

    Each frequency is interpolated between its original value and this value divided by `factor`. In the paper,
    interpolation is linear in the number of rotations. In the authors' code and in transformers, interpolation is
    linear in the pair's index, from the index with beta_fast rotations to the index with beta_slow rotations. Both
    indices are rounded outward unless `truncate` is off. Trained models follow the code, and so does this function.
    """
    pairs = len(frequencies)

    def index_of(rotations: float) -> float:
        """Return the (real-valued) index of the pair with this number of rotations over the original context."""
        return pairs * log(scaling.original_max_position / (rotations * 2 * pi)) / log(theta)

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    width = high - low if high != low else 0.001
    divided = ((torch.arange(pairs, dtype=torch.float64, device="cpu") - low) / width).clamp(0.0, 1.0)
    return (1.0 - divided) * frequencies + divided * frequencies / scaling.factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair of every head by its position's angle, in the wider of float32 and x's dtype. Return the dtype of x.

    x `[batch, seq, heads, head_dim]`; cos, sin `[seq, 1, rope_dim / 2]` or `[batch, seq, 1, rope_dim / 2]`. Only the
    first rope_dim elements of each head are rotated.
    """
    pairs = cos.shape[-1]
    first, second, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    first, second = first.to(promoted(x.dtype)), second.to(promoted(x.dtype))
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat([*(half.to(x.dtype) for half in turned), rest], dim=-1)
