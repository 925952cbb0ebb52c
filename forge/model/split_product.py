"""A linear layer with a float32 weight and bfloat16 input, computed by bfloat16 products on a GPU.

A GPU's float32 products do not use tensor cores, so an H100 takes about 15 times as long as in bfloat16. Here a float32
factor becomes the sum of two bfloat16 terms, `high` and `low`, with a relative error below 2^-15. The input is exact,
and products of two bfloat16 values are exact in float32, in which tensor cores add them. Rounding the input to bfloat16
has an error of up to 2^-8, 128 times as large.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# The bits of a float32 value that bfloat16 has too: sign, exponent, and 7 bits of the fraction.
OF_BFLOAT16 = -(1 << 16)


def linear(x: Tensor, weight: Tensor, on_gpu: bool | None = None) -> Tensor:
    """x `[..., in]`, weight `[out, in]` -> `[..., out]` in the dtype of `weight`.

    on_gpu: True: compute as on a GPU. False: as on a CPU. None: as on the device of `x`.
    """
    split = x.is_cuda if on_gpu is None else on_gpu
    if not split or (x.dtype, weight.dtype) != (torch.bfloat16, torch.float32):
        return F.linear(x.to(weight.dtype), weight)
    return _SplitLinear.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


def terms(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return `high` and `low`, bfloat16. Their sum is `values` (float32), with a relative error below 2^-15.

    `high` is truncated by a bit mask, not rounded. A compiler would remove a rounding to bfloat16 before float32
    arithmetic, and `low` would then be 0. If a value is not finite, `low` is NaN.
    """
    high = (values.view(torch.int32) & OF_BFLOAT16).view(torch.float32)
    return high.bfloat16(), (values - high).bfloat16()


class _SplitLinear(torch.autograd.Function):
    """x bfloat16 `[n, in]`, weight float32 `[out, in]` -> float32 `[n, out]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        both = multiply(x, torch.cat(terms(weight)).t())
        return both.unflatten(1, (2, -1)).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        high, low = terms(grad)
        of_high, of_low = terms(weight)
        # Leave out low * of_low: it is below 2^-14 of the product, and x's gradient is rounded to bfloat16 anyway.
        factors = torch.cat((high, low, high), 1)
        grad_x = factors @ torch.cat((of_high, of_high, of_low))
        grad_weight = multiply(factors[:, : 2 * grad.shape[1]].t(), x)
        return grad_x, grad_weight.unflatten(0, (2, -1)).sum(0)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two bfloat16 matrices in float32. PyTorch has this operator on GPUs only."""
    return torch.mm(left, right, out_dtype=torch.float32)
