"""The dense feed-forward half of a block."""

from __future__ import annotations

from torch import Tensor, nn

from forge.model.activation import SWIGLU, Activation


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
