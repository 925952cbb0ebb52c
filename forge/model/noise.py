"""Random numbers as functions of keys, without a generator: equal for any batch, layout and repetition."""

from __future__ import annotations

from math import tau

import torch
from torch import Tensor

# Odd 64-bit multipliers of the noise's keys.
_LABEL, _POSITION, _LAYER, _EXPERT = (
    -7046029254386353131,
    -4417276706812531889,
    1609587929392839161,
    -8796714831421723037,
)


def token_noise(labels: Tensor, layer: int, n: int, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers `[batch, seq, n]`, without a generator.

    labels: int64 `[batch, seq]`. The key of a number is (labels of the whole row, position, layer, index). The noise
    therefore does not depend on the sample's row in the batch, recomputation, microbatches or the data-parallel layout. A
    sequence must not be split over processes.
    """
    position = torch.arange(labels.shape[1], device=labels.device)
    index = torch.arange(n, device=labels.device)
    row = mix(labels * _LABEL + position * _POSITION).sum(1, keepdim=True)
    token = mix(row + position * _POSITION + layer * _LAYER)
    keys = mix(token.unsqueeze(-1) + index * _EXPERT)
    # Box and Muller 1958, from two uniform numbers of 31 bits each; the first is not 0.
    first, second = (keys >> 32) & 0x7FFFFFFF, keys & 0x7FFFFFFF
    exact = torch.float64
    radius = (-2.0 * ((first + 1).to(exact) / 2**31).log()).sqrt()
    return (radius * (tau / 2**31 * second.to(exact)).cos()).to(dtype)


def mix(key: Tensor) -> Tensor:
    """Scramble int64 keys (the finaliser of splitmix64, Steele et al. 2014)."""
    key = (key ^ _shifted(key, 30)) * -4658895280553007687
    key = (key ^ _shifted(key, 27)) * -7723592293110705685
    return key ^ _shifted(key, 31)


def _shifted(key: Tensor, bits: int) -> Tensor:
    """Shift `key` right and fill with zeros. PyTorch's own shift repeats the sign bit."""
    return (key >> bits) & ((1 << (64 - bits)) - 1)
