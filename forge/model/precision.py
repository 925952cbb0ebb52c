"""Where the model upcasts: to float32, or to float64 when it computes in float64."""

from __future__ import annotations

import torch


def promoted(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums that bfloat16 would spoil: float32 at least, float64 for float64."""
    return torch.promote_types(torch.float32, dtype)
