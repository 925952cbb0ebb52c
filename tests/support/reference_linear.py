"""A second, plain implementation of Gated DeltaNet and Kimi Delta Attention: loops over tokens and heads."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.config.model import ModelConfig
from tests.support.reference_moe import Parameters


def linear_attention(own: Parameters, config: ModelConfig, x: Tensor, documents: Tensor) -> Tensor:
    """Compute one layer for one sequence: x `[seq, dim]`, documents `[seq]` -> `[seq, dim]`."""
    linear = config.linear_attention
    assert linear is not None
    size, width = linear.key_head_dim, linear.value_head_dim
    q, k, v = (_convolved(own, letter, x, documents) for letter in "qkv")
    gate, lengths = _projected(own, "g", x), _projected(own, "a", x)
    bias, squash = own["attention.decay.dt_bias"], _silu if linear.kind == "gated_delta" else _sigmoid
    channels = size if linear.kind == "kimi_delta" else 1
    outs = []
    for head in range(linear.n_value_heads):
        of_key = head * linear.n_key_heads // linear.n_value_heads
        keys, values = slice(of_key * size, (of_key + 1) * size), slice(head * width, (head + 1) * width)
        state, reads = torch.zeros(width, size, dtype=x.dtype), []
        for t in range(len(x)):
            if t and documents[t] != documents[t - 1]:
                state = torch.zeros_like(state)
            key = k[t, keys] / (k[t, keys].square().sum() + 1e-6).sqrt()
            query = q[t, keys] / (q[t, keys].square().sum() + 1e-6).sqrt() / size**0.5
            own_lengths = slice(head * channels, (head + 1) * channels)
            length, rate = (
                lengths[t, own_lengths] + bias[own_lengths],
                own["attention.decay.a_log"][head].exp(),
            )
            alpha = (-rate * (1 + length.exp()).log()).exp()
            if linear.kind == "kimi_delta" and linear.decay_bound:
                alpha = (-linear.decay_bound * _sigmoid(rate * length)).exp()
            beta = _sigmoid(x[t] @ own["attention.wb.weight"][head])
            # In the papers' notation: S = S Diag(alpha) (I - beta k k^T) + beta v k^T.
            erased = torch.eye(size, dtype=x.dtype) - beta * torch.outer(key, key)
            state = state * alpha @ erased + beta * torch.outer(v[t, values], key)
            read = state @ query
            normed = read / (read.square().mean() + config.norm_eps).sqrt() * own["attention.out_norm.weight"]
            reads.append(normed * squash(gate[t, values]))
        outs.append(torch.stack(reads))
    return torch.cat(outs, dim=-1) @ own["attention.wo.weight"].T


def _convolved(own: Parameters, letter: str, x: Tensor, documents: Tensor) -> Tensor:
    projected, weight = x @ own[f"attention.w{letter}.weight"].T, own[f"attention.conv.{letter}"]
    rows = []
    for t in range(len(x)):
        row = torch.zeros_like(projected[t])
        for back in range(weight.shape[1]):
            if t < back or documents[t - back] != documents[t]:
                break
            row = row + weight[:, -1 - back] * projected[t - back]
        rows.append(_silu(row))
    return torch.stack(rows)


def _projected(own: Parameters, letter: str, x: Tensor) -> Tensor:
    """Project x. If the layer has a low-rank first half, apply it first."""
    down = own.get(f"attention.w{letter}_down.weight")
    return (x if down is None else x @ down.T) @ own[f"attention.w{letter}.weight"].T


def _silu(x: Tensor) -> Tensor:
    return x * _sigmoid(x)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())
