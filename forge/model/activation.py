"""Activation functions between the projections of a feed-forward, dense or expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
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
