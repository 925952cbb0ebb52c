"""The dense feed-forward half of a block."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer"): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x `[batch, seq, dim]` -> `[batch, seq, dim]`."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
