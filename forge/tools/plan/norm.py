"""RMS norm as it runs on a GPU, for plans made on a CPU.

On CUDA `F.rms_norm` is one kernel. It keeps its input, its weight and one float32 number per row for backward. On a CPU
it is several operators, which also keep float32 intermediate results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge.model.norm import RMSNorm, zero_centered_norm


def use_fused_norms(model: nn.Module) -> None:
    """Make each RMS norm of `model` compute with one operator, like the CUDA kernel.

    CUDA has a fused kernel only if weight and input have the same dtype. Other norms keep PyTorch's operators.
    """
    for module in model.modules():
        if isinstance(module, RMSNorm):
            zero_centered = module.normalize is zero_centered_norm
            module.normalize = partial(zero_centered_norm, norm=norm_on_gpu) if zero_centered else norm_on_gpu


def norm_on_gpu(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    """Compute `F.rms_norm` on fake tensors: one operator if CUDA has a fused kernel for these dtypes."""
    if weight.dtype != x.dtype:
        return F.rms_norm(x, list(shape), weight, eps)
    return fused_norm(x, weight)[0]


@torch.library.custom_op("forge::fused_norm", mutates_args=())
def fused_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the RMS norm over the last dim, and the reciprocal root mean square of each row, float32 `[..., 1]`.

    For fake tensors only.
    """
    raise NotImplementedError("this operator exists for plans only: it has shapes, but computes no values")


@torch.library.custom_op("forge::fused_norm_backward", mutates_args=())
def fused_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight. For fake tensors only."""
    raise NotImplementedError("this operator exists for plans only: it has shapes, but computes no values")


@fused_norm.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@fused_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad: Tensor, _of_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    x, weight, scale = ctx.saved_tensors
    return fused_norm_backward(grad, x, weight, scale)


fused_norm.register_autograd(_backward, setup_context=_keep)
