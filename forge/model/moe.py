"""A mixture of experts in place of a block's feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge.config.model import ModelConfig
from forge.model.dispatch import Dispatcher, LocalDispatcher
from forge.model.experts import Experts
from forge.model.feed_forward import activation_of, make_feed_forward
from forge.model.flops import flops_per_token
from forge.model.norm import norm_of
from forge.model.router import Router


class Rounding(Protocol):
    """Rounds the rows of a dispatch. An extension point of `MoE`: float8 sets it."""

    def values(self, rows: Tensor) -> Tensor:
        """Return `rows` `[tokens, dim]` rounded. The gradient passes unchanged."""

    def gradients(self, rows: Tensor) -> Tensor:
        """Return `rows` `[tokens, dim]` unchanged. The gradient is rounded."""

    def compile(self, compiler: Callable[..., Any]) -> None:
        """Replace this object's functions with compiled ones. compiler: compiles a function."""


class Piecewise(nn.Linear):
    """A linear layer that tensor parallelism does not split.

    Instead, each rank applies the whole layer to its piece of the sequence.
    """


class MoE(nn.Module):
    """Mixture of experts: each token goes through the experts chosen by the router and through all shared experts.

    The shared experts are computed as one feed-forward of their total width. The result is the same, with fewer and
    larger matrix products.

    With `latent_dim`, routed experts read and write a narrower latent, so dispatch moves narrower rows (LatentMoE,
    Elango et al. 2026, "Revisiting Efficiency-Accuracy Scaling in Mixture-of-Experts Architectures"). A projection to
    the latent precedes dispatch. The weighted sum passes through a norm, as in Kimi K3, and is projected back. Router
    and shared experts read the stream.

    `dispatch` and `experts` are extension points: expert parallelism replaces both. `rounding`, if not None, rounds the
    inputs of the experts and the gradients of their weighted sums.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.router = Router(config.dim, moe, layer)
        activation = activation_of(config)
        width = moe.latent_dim or config.dim
        self.experts = Experts(moe.n_experts, width, moe.expert_dim, activation, moe.expert_bias)
        self.to_latent = self.latent_norm = self.from_latent = None
        if moe.latent_dim:
            self.to_latent = Piecewise(config.dim, width, bias=False)
            self.latent_norm = norm_of(config, width)
            self.from_latent = Piecewise(width, config.dim, bias=False)
        weights = sum(weight.numel() for weight in self.experts.parameters())
        # Number of expert parameters not used by a token.
        self.idle_parameters = weights // moe.n_experts * (moe.n_experts - moe.top_k)
        shared_dim = moe.n_shared_experts * moe.expert_dim
        self.shared = (
            make_feed_forward(config.dim, shared_dim, activation, config.ffn_bias) if shared_dim else None
        )
        self.shared_gate = SharedGate(config.dim) if shared_dim and moe.shared_expert_gate else None
        self.dispatch: Dispatcher = LocalDispatcher(moe.n_experts, drops=moe.capacity_factor > 0)
        self.rounding: Rounding | None = None

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """x `[batch, seq, dim]`, labels int64 `[batch, seq]` -> `[batch, seq, dim]`.

        Tokens labelled IGNORE do not count in balancing.
        """
        if self.shared is None:
            return self.routed(x, labels)
        # Shared experts first: under expert parallelism, the host waits in `routed` for other ranks' counts, and the
        # GPU computes the shared experts meanwhile.
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = self.shared_gate(x) * shared
        return self.routed(x, labels) + shared

    def routed(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Return the output of the chosen experts; shapes as in `forward`."""
        experts, weights = self.router(x, labels)
        rows = x if self.to_latent is None else self.to_latent(x)
        sent = rows.flatten(0, 1)
        if self.rounding is not None:
            sent = self.rounding.values(sent)
        out = self.experts(sent, experts, weights, self.dispatch)
        if self.rounding is not None:
            out = self.rounding.gradients(out)
        out = out.view_as(rows)
        if self.latent_norm is None or self.from_latent is None:
            return out
        return self.from_latent(self.latent_norm(out))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs per token of router, shared experts, latent projections and `top_k` routed experts."""
        config = self.router.config
        of_one = (self.experts.w13.numel() + self.experts.w2.numel()) // config.n_experts
        rest = (self.router, self.shared, self.shared_gate, self.to_latent, self.from_latent)
        others = (flops_per_token(module, seq_len) for module in rest if module is not None)
        return 6 * of_one * config.top_k + sum(others)


class SharedGate(nn.Module):
    """The weight of the shared experts for each token: the sigmoid of a projection to one number."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, dim))

    def forward(self, x: Tensor) -> Tensor:
        """x `[batch, seq, dim]` -> `[batch, seq, 1]`."""
        return F.linear(x, self.weight).sigmoid()
