"""A description of every parameter's initial value. `forge.parallel.initialize` generates the elements of each shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from forge.config.model import ModelConfig
from forge.model.attention import Sinks
from forge.model.experts import Experts
from forge.model.loss import Embedding, Head
from forge.model.moe import SharedGate
from forge.model.mtp import Join
from forge.model.norm import RMSNorm
from forge.model.router import Router

# Projections into the residual stream. The stream is the sum of 2 * n_layers of their outputs (GPT-2, Radford et al.
# 2019, 2.3).
INTO_STREAM = ("wo", "w2", "from_latent")


@dataclass(frozen=True)
class Normal:
    """Independent samples of a normal distribution with mean 0 and standard deviation `std`."""

    std: float

    def of(self, drawn: Tensor) -> Tensor:
        """Turn samples of the standard normal distribution into samples of this distribution, in place."""
        return drawn.mul_(self.std)


@dataclass(frozen=True)
class Uniform:
    """Independent samples of a uniform distribution, mapped elementwise by `function` in float64."""

    low: float
    high: float
    function: Callable[[Tensor], Tensor] | None = None

    def of(self, drawn: Tensor) -> Tensor:
        """Turn samples of the standard normal distribution into samples of this (mapped) uniform distribution."""
        # In float64, then rounded: results of float32 functions depend on the number of elements computed together, and
        # this number differs between ranks.
        values = self.low + (self.high - self.low) * torch.special.ndtr(drawn.double())
        return (values if self.function is None else self.function(values)).to(drawn.dtype)


def initial_values(model: nn.Module, config: ModelConfig) -> dict[str, float | Normal | Uniform]:
    """Return the initial value of every parameter of `model`, by name. `model` may be a single pipeline stage.

    A user's module class must have a method `initial_value(name)`. Raises TypeError if the method is missing, so no
    parameter stays uninitialised.
    """
    return {
        f"{path}.{leaf}".removeprefix("."): _start(module, path, leaf, config)
        for path, module in model.named_modules()
        for leaf, _ in module.named_parameters(recurse=False)
    }


def _start(module: nn.Module, path: str, leaf: str, config: ModelConfig) -> float | Normal | Uniform:
    if isinstance(module, RMSNorm):
        return module.initial
    if isinstance(module, nn.Linear | Experts | Router) and leaf.endswith("bias"):
        return 0.0
    if isinstance(module, nn.Linear):
        return _projection(path.rpartition(".")[2], config)
    if isinstance(module, Experts):
        return _projection(leaf, config)
    if isinstance(module, Embedding | Head | Join | Router | SharedGate | Sinks):
        return Normal(config.init_std)
    if (own := getattr(module, "initial_value", None)) is not None:
        return own(leaf)
    kind = type(module).__name__
    raise TypeError(
        f"{path}.{leaf} has no initial value: add a method initial_value(name) to the class {kind}"
    )


def _projection(name: str, config: ModelConfig) -> Normal:
    return Normal(config.init_std / sqrt(2 * config.n_layers) if name in INTO_STREAM else config.init_std)
