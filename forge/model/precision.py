"""The dtype that the model upcasts to: float32, or float64 when it computes in float64."""

from __future__ import annotations

import torch


def promoted(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and other operations that need at least float32: float64 for float64."""
    return torch.promote_types(torch.float32, dtype)
