"""The dense feed-forward half of a block, and the activation functions of feed-forwards, dense or expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge.config.model import ModelConfig


class Activation(NamedTuple):
    """An activation function of `inputs` projections of equal shape: 2 (gate and up) or 1."""

    function: Callable[..., Tensor]
    inputs: int = 2


def activation_of(config: ModelConfig) -> Activation:
    """Return the activation named by `config`."""
    clamped = partial(clamped_swiglu, limit=config.activation_limit)
    bounded = partial(situ, limit=config.activation_limit, up_limit=config.activation_up_limit)
    return {
        "silu": SWIGLU,
        "gelu_tanh": Activation(geglu),
        "relu2": Activation(relu2, inputs=1),
        "clamped_swiglu": Activation(clamped),
        "situ": Activation(bounded),
    }[config.activation]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, "GLU Variants Improve Transformer")."""
    return F.silu(gate) * up


SWIGLU = Activation(swiglu)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, with GELU by its tanh formula (Gemma)."""
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Compute g sigmoid(1.702 g) * (u + 1) (gpt-oss).

    g: the gate, clamped to at most `limit`. u: up, clamped to [-limit, limit].
    """
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


def situ(gate: Tensor, up: Tensor, limit: float, up_limit: float) -> Tensor:
    """Return sigmoid(g) * limit * tanh(g / limit) * up_limit * tanh(u / up_limit) (Kimi K3, 2607.24653). g: gate. u: up."""
    return torch.sigmoid(gate) * limit * torch.tanh(gate / limit) * up_limit * torch.tanh(up / up_limit)


def relu2(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021, "Primer")."""
    return F.relu(x).square()


class FeedForward(nn.Module):
    """w2(activation(w1 x, w3 x)), by default SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int, activation: Activation = SWIGLU, bias: bool = False):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=bias)
        self.w3 = nn.Linear(dim, hidden_dim, bias=bias)
        self.w2 = nn.Linear(hidden_dim, dim, bias=bias)
        self.activation = activation.function

    def forward(self, x: Tensor) -> Tensor:
        """x `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        return self.w2(self.activation(self.w1(x), self.w3(x)))


class UngatedFeedForward(FeedForward):
    """w2(activation(w1 x)), without w3."""

    def __init__(self, dim: int, hidden_dim: int, activation: Activation, bias: bool = False):
        super().__init__(dim, hidden_dim, activation, bias)
        del self.w3

    def forward(self, x: Tensor) -> Tensor:
        """x `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        return self.w2(self.activation(self.w1(x)))


def make_feed_forward(dim: int, hidden_dim: int, activation: Activation, bias: bool) -> FeedForward:
    """Build the feed-forward for `activation`, with or without a gate."""
    kind = FeedForward if activation.inputs == 2 else UngatedFeedForward
    return kind(dim, hidden_dim, activation, bias)
