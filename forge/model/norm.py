"""Root mean square normalisation (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization")."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge.config.model import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, of size `dim`.

    zero_centered: multiply by (1 + weight). Computes in the wider of float32 and x's dtype. Returns the dtype of x.
    """

    def __init__(self, dim: int, eps: float, zero_centered: bool = False):
        super().__init__()
        self.eps = eps
        self.initial = 0.0 if zero_centered else 1.0
        self.normalize: Callable[..., Tensor] = zero_centered_norm if zero_centered else F.rms_norm
        self.weight = nn.Parameter(torch.full((dim,), self.initial))

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., dim]` -> `[..., dim]`."""
        return self.normalize(x, self.weight.shape, self.weight, self.eps)


class ProjectionNorm(RMSNorm):
    """RMSNorm over all heads of a token together, with one weight per element."""

    def forward(self, x: Tensor) -> Tensor:
        """x `[batch, seq, heads, head_dim]` -> the same shape."""
        return super().forward(x.flatten(-2)).view_as(x)


def zero_centered_norm(
    x: Tensor, shape: torch.Size, weight: Tensor, eps: float, norm: Callable[..., Tensor] = F.rms_norm
) -> Tensor:
    """Compute `norm` with weight 1 + weight.

    1 + weight is not rounded to the dtype of x, because bfloat16 has steps of 1/128 near 1.
    """
    exact = promoted(x.dtype)
    return norm(x.to(exact), shape, 1.0 + weight.to(exact), eps).to(x.dtype)


def norm_of(config: ModelConfig, dim: int) -> RMSNorm:
    """Return the configured RMSNorm over `dim` elements."""
    return RMSNorm(dim, config.norm_eps, config.zero_centered_norms)


def qk_norm_of(config: ModelConfig, heads: int) -> RMSNorm | None:
    """Return the norm of queries or keys `[batch, seq, heads, head_dim]`; None if `config` has no QK-norm."""
    if not config.qk_norm:
        return None
    if config.qk_norm_over == "head":
        return norm_of(config, config.head_dim)
    return ProjectionNorm(heads * config.head_dim, config.norm_eps, config.zero_centered_norms)


def promoted(dtype: torch.dtype) -> torch.dtype:
    """Return the wider of float32 and `dtype`, for sums and other operations that need at least float32."""
    return torch.promote_types(torch.float32, dtype)
