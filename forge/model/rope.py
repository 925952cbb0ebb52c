"""Rotary position embedding, with linear frequency scaling and the scalings of Llama 3 and YaRN.

Half rotation: element i of a head forms a pair with element i + rope_dim/2, as in transformers. Su et al. 2021
("RoFormer") pair neighbours. The two are equivalent up to a permutation of each head's elements.
"""

from __future__ import annotations

from math import ceil, floor, log, pi

import torch
from torch import Tensor

from forge.config.model import ModelConfig, RopeScalingConfig
from forge.model.norm import promoted


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
