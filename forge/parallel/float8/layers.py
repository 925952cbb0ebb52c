"""Put the products of a block format into the linear layers and routed experts of a model.

Parameters, names and hooks stay. Under tensor parallelism a layer's weight is a DTensor, and the products run on local
tensors. If the output is a sum over tp ranks, each rank adds bias / tp.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Shard as Split

from forge.model import Experts
from forge.model.experts import RowGroups, bias_of_rows
from forge.parallel.float8.products import BlockGroupedLinear, BlockLinear, Products
from forge.parallel.modules import replace_module
from forge.parallel.tensor.local import LocalLinear


class BlockFormatLinear(nn.Linear):
    """A linear layer with the parameters of `plain`, computed by `products`."""

    def __init__(self, plain: nn.Linear, products: Products):
        with torch.device("meta"):
            super().__init__(plain.in_features, plain.out_features, plain.bias is not None)
        self.weight, self.bias = plain.weight, plain.bias
        self.products = products

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., tokens, in]` -> `[..., tokens, out]`; a DTensor if the weight is one."""
        weight, bias = self.weight, self.bias
        if not isinstance(weight, DTensor):
            return linear(x, weight, bias, self.products)
        assert isinstance(x, DTensor)
        mesh, placement = weight.device_mesh, weight.placements[0]
        split_outputs, split_inputs = placement == Split(0), placement == Split(1)
        # If ranks compute different outputs from the same input, the input's gradient is a sum over ranks.
        own = x.to_local(grad_placements=[Partial()] if split_outputs else x.placements)
        y = BlockLinear.apply(own, weight.to_local(), self.products)
        if bias is not None:
            assert isinstance(bias, DTensor)
            y = AddInParts.apply(y, bias.to_local(), mesh.size() if split_inputs else 1)
        result = Split(y.ndim - 1) if split_outputs else Partial() if split_inputs else x.placements[0]
        return DTensor.from_local(y, mesh, [result], run_check=False)


def convert_linear(model: nn.Module, name: str, products: Products) -> None:
    """Make the linear layer `name` of `model` compute with `products`, in place."""
    layer = model.get_submodule(name)
    if isinstance(layer, LocalLinear):
        layer.multiply = functools.partial(linear, products=products)
    else:
        assert isinstance(layer, nn.Linear)
        replace_module(model, name, BlockFormatLinear(layer, products))


def convert_experts(experts: Experts, products: Products) -> None:
    """Make `experts` compute with `products`, in place."""
    experts.multiply = functools.partial(grouped, products=products)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, products: Products) -> Tensor:
    """x `[..., tokens, in]`, weight `[out, in]`, bias `[out]` -> `[..., tokens, out]`."""
    y = BlockLinear.apply(x, weight, products)
    return y if bias is None else y + bias


def grouped(
    rows: Tensor, weight: Tensor, groups: RowGroups, bias: Tensor | None = None, *, products: Products
) -> Tensor:
    """Like `grouped_linear` (forge/model/experts.py), computed by `products`."""
    y = BlockGroupedLinear.apply(rows, weight, groups, products)
    return y if bias is None else y + bias_of_rows(rows, bias, groups)


class AddInParts(torch.autograd.Function):
    """Add bias / parts to the output on each of `parts` ranks. The sum of the outputs then contains the bias once.

    In backward, every rank gets the gradient of the whole bias.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, parts: int) -> Tensor:
        """y `[..., out]`, bias `[out]` -> `[..., out]`."""
        return y + bias / parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, grad.flatten(0, -2).sum(0), None
