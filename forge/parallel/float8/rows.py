"""Rows that travel to routed experts as float8 codes (`precision.float8_dispatch`).

DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.2, sends the inputs of experts, and the gradients of their outputs, in
float8. The outputs of experts, and the gradients of their inputs, stay in precision.compute.

`RoundedRows` rounds these inputs and gradients in every layout, so the layout changes no result. Rounded values are
codes times powers of two (mxfp8 in formats.py), so encoding them again loses nothing. Between nodes, `RoundedRows.send`
sends codes and scales, 33 bytes for 32 values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from forge.model import MoE
from forge.model.norm import promoted
from forge.parallel.all_to_all import Arrival
from forge.parallel.dispatch import NodeDispatcher
from forge.parallel.float8.formats import CODES, MXFP8, Quantised
from forge.runtime import compat

log = logging.getLogger(__name__)

BLOCK = MXFP8.along(-1)


def send_in_float8(model: nn.Module) -> None:
    """Make each mixture of experts in `model` round the rows of its dispatch. A NodeDispatcher sends them as codes."""
    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    coded = 0
    for layer in layers:
        layer.rounding = rounding = RoundedRows()
        if isinstance(layer.dispatch, NodeDispatcher):
            layer.dispatch.send_rows = layer.dispatch.send_gradients = rounding.send
            coded += 1
    log.info(
        "%d layers round the rows sent to experts to mxfp8; %d of these layers send the rows as float8 codes",
        len(layers),
        coded,
    )


class RoundedRows:
    """The `Rounding` (forge/model/moe.py) of rows in mxfp8: one power of two as the scale of 32 values."""

    def __init__(self) -> None:
        # Extension points: compilation replaces these functions.
        self.encode: Callable[[Tensor], Tensor] = encode
        self.decode: Callable[[Tensor, int, torch.dtype], Tensor] = decode
        self.round: Callable[[Tensor], Tensor] = rounded

    def values(self, rows: Tensor) -> Tensor:
        """Return `rows` `[n, dim]` rounded. The gradient passes unchanged."""
        return _RoundValues.apply(rows, self.round)

    def gradients(self, rows: Tensor) -> Tensor:
        """Return `rows` `[n, dim]` unchanged. The gradient is rounded."""
        return _RoundGradients.apply(rows, self.round)

    def send(self, rows: Tensor, group: dist.ProcessGroup, receives: list[int], sends: list[int]) -> Arrival:
        """Start an all-to-all of `rows` as codes, with the interface `Send` (forge/parallel/all_to_all.py).

        The received rows are rounded.
        """
        codes = compat.start_all_to_all(self.encode(rows), group, receives, sends)
        return lambda: self.decode(codes(), rows.shape[1], rows.dtype)

    def compile(self, compiler: Callable[..., Any]) -> None:
        """Replace this object's functions with compiled ones. compiler: compiles a function."""
        self.encode, self.decode, self.round = map(compiler, (self.encode, self.decode, self.round))


def encode(rows: Tensor) -> Tensor:
    """rows `[n, dim]` -> codes followed by the exponents of their scales, uint8 `[n, dim + ceil(dim / 32)]`."""
    return torch.cat([part.view(torch.uint8) for part in MXFP8.quantise(rows, BLOCK)], -1)


def decode(codes: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Undo `encode`: uint8 `[n, dim + ceil(dim / 32)]` -> `[n, dim]` in `dtype`."""
    values, exponents = codes.split([dim, codes.shape[1] - dim], -1)
    quantised = Quantised(values.contiguous().view(CODES), exponents.contiguous().view(torch.float8_e8m0fnu))
    return MXFP8.dequantise(quantised, BLOCK, promoted(dtype)).to(dtype)


def rounded(rows: Tensor) -> Tensor:
    """Return `rows` `[n, dim]` rounded to mxfp8."""
    return MXFP8.rounded(rows, BLOCK, promoted(rows.dtype)).to(rows.dtype)


class _RoundValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, None


class _RoundGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.function(grad), None
