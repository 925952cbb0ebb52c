"""The matrix products of a linear layer and of routed experts in a block format, with their gradients.

A linear layer y = x W^T has three products, each summing over a different dimension:

    output           y = x W^T     over the inputs    x in 1 x B, W along its columns
    input gradient   dx = dy W     over the outputs   dy in 1 x B, W along its rows
    weight gradient  dW = dy^T x   over the tokens    dy and x along the tokens of each sequence

Each operand is quantised separately for each of its two products: x, dy and, under mxfp8, W. Blocks of tokens begin at
the start of a sequence. If every rank has whole blocks, the blocks depend neither on the microbatch nor on the layout.

For routed experts, output and input gradient are each one grouped product over all experts. The weight gradient is
computed from unquantised values. Blocks along the tokens of an expert would depend on the set of arriving tokens, and so
on the layout and the microbatch. torchao's recipe MXFP8_RCEIL_WGRAD_WITH_HP also uses unquantised values.

Implementations of `Products`: `Emulated` in this file, for any device, and the GPU's kernels in kernels.py.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.model.experts import RowGroups, grouped_linear, grouped_outer
from forge.model.norm import promoted
from forge.parallel.float8.formats import Format, Quantised
from forge.parallel.float8.gathering import GatheredWeight


class Products(Protocol):
    """Quantises two operands, multiplies them, and returns the result in the dtype of the first operand."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """x `[..., tokens, in]`, weight `[out, in]` -> `[..., tokens, out]`."""

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad `[..., tokens, out]`, weight `[out, in]` -> `[..., tokens, in]`."""

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """grad `[..., tokens, out]`, x `[..., tokens, in]` -> `[out, in]`, summed over all leading dimensions."""

    def grouped_output(self, rows: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        """rows `[n, in]` in `groups`, weight `[groups, out, in]` -> `[n, out]`."""

    def grouped_grad_input(self, grad: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        """grad `[n, out]` in `groups`, weight `[groups, out, in]` -> `[n, in]`."""


class Emulated:
    """Products of dequantised values, computed in the wider of float32 and the operand's dtype.

    A dequantised MX value is exact in float32; a blockwise value is rounded once. Both are exact in float64.
    """

    def __init__(self, form: Format):
        self.form = form

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return (self._activation(x, -1) @ self._weight(weight, -1).mT).to(x.dtype)

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        return (self._activation(grad, -1) @ self._weight(weight, -2)).to(grad.dtype)

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        grad_rows, x_rows = (self._activation(one, -2).flatten(0, -2) for one in (grad, x))
        return (grad_rows.mT @ x_rows).to(x.dtype)

    def grouped_output(self, rows: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        return grouped_linear(self._activation(rows, -1), self._weight(weight, -1), groups).to(rows.dtype)

    def grouped_grad_input(self, grad: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        # A transposed copy, because the grouped product takes weights `[groups, out, in]`.
        transposed = self._weight(weight, -2).mT.contiguous()
        return grouped_linear(self._activation(grad, -1), transposed, groups).to(grad.dtype)

    def _activation(self, x: Tensor, dim: int) -> Tensor:
        return self.form.rounded(x, self.form.along(dim), promoted(x.dtype))

    def _weight(self, weight: Tensor, dim: int) -> Tensor:
        quantised = quantised_weight(weight, self.form, dim)
        return self.form.dequantise(quantised, self.form.of_weight(dim), promoted(weight.dtype))


def quantised_weight(weight: Tensor, form: Format, dim: int) -> Quantised:
    """Return the codes and scales of weight `[..., out, in]` for a product that sums over dimension `dim`.

    Codes gathered by FSDP2 are used unchanged.
    """
    if isinstance(weight, GatheredWeight):
        return weight.quantised(dim)
    return form.quantise(weight, form.of_weight(dim))


class BlockLinear(torch.autograd.Function):
    """The linear layer y = x W^T, computed by `products`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Products) -> Tensor:
        """x `[..., tokens, in]`, weight `[out, in]` -> `[..., tokens, out]` in the dtype of x."""
        ctx.save_for_backward(x, weight)
        ctx.products = products
        return products.output(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        products, (of_x, of_weight, _) = ctx.products, ctx.needs_input_grad
        return (
            products.grad_input(grad, weight) if of_x else None,
            products.grad_weight(grad, x).to(weight.dtype) if of_weight else None,
            None,
        )


class BlockGroupedLinear(torch.autograd.Function):
    """The grouped product of `rows` with the weights of their experts, computed by `products`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, groups: RowGroups, products: Products) -> Tensor:
        """rows `[n, in]` in `groups`, weight `[groups, out, in]` -> `[n, out]` in the dtype of rows."""
        ctx.save_for_backward(rows, weight)
        ctx.groups, ctx.products = groups, products
        return products.grouped_output(rows, weight, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weight = ctx.saved_tensors
        groups, (of_rows, of_weight, *_) = ctx.groups, ctx.needs_input_grad
        return (
            ctx.products.grouped_grad_input(grad, weight, groups) if of_rows else None,
            grouped_outer(grad, rows, groups).to(weight.dtype) if of_weight else None,
            None,
            None,
        )
