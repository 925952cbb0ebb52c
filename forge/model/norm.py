"""Root mean square normalisation (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization")."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, of size `dim`.

    Keeps the dtype of x; PyTorch's kernel computes in promote(float32, dtype).
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., dim]` -> `[..., dim]`."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
