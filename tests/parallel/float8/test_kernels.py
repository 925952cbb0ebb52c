"""Operands of the GPU kernels: stubs that read operands like the kernels give the emulated products.

tests/simulated_gpu/test_float8.py launches the real kernels on the simulated GPU, which checks arguments and computes
nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from forge.model.experts import RowGroups
from forge.parallel.float8.formats import BLOCKWISE, MXFP8
from forge.parallel.float8.kernels import BlockwiseKernels, MXKernels
from forge.parallel.float8.products import Emulated

SIZES = [(2, 256, 256, 384), (2, 100, 160, 144)]


def operands(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, inputs, outputs = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, tokens, inputs), (outputs, inputs), (batch, tokens, outputs)
    x, weight, grad = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
    return x, weight, grad


def assert_same(kernels: Any, emulated: Emulated, sizes: tuple[int, ...]) -> None:
    x, weight, grad = operands(sizes)
    for name, (left, right) in {
        "output": (x, weight),
        "grad_input": (grad, weight),
        "grad_weight": (grad, x),
    }.items():
        found, expected = getattr(kernels, name)(left, right), getattr(emulated, name)(left, right)
        torch.testing.assert_close(
            found, expected, rtol=1e-2, atol=1e-2, msg=lambda m, name=name: f"{name}: {m}"
        )


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_recipe_a: Any, scale_b: Tensor, scale_recipe_b: Any, **_: Any
):
    """Apply cuBLASLt's rules for block scales: sides, strides and the padding of scales."""
    assert scale_recipe_a == F.ScalingType.BlockWise1x128
    assert a.stride(1) == 1 and b.stride(0) == 1 and not a.shape[1] % 128 and not b.shape[1] % 16
    assert scale_a.shape == (a.shape[0], a.shape[1] // 128) and scale_a.stride(0) == 1
    if scale_recipe_b == F.ScalingType.BlockWise128x128:
        assert scale_b.stride(0) == 1 and scale_b.stride(1) % 4 == 0
        factors = scale_b[: a.shape[1] // 128].repeat_interleave(128, 0).repeat_interleave(128, 1)
    else:
        assert scale_b.shape == (b.shape[1], a.shape[1] // 128) and scale_b.stride(0) == 1
        factors = scale_b.mT.repeat_interleave(128, 0)
    values = a.float() * scale_a.repeat_interleave(128, 1)
    return (values @ (b.float() * factors)).bfloat16()


@pytest.mark.parametrize("sizes", SIZES)
def test_blockwise_products_of_hopper(monkeypatch, sizes: tuple[int, ...]) -> None:
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    assert_same(BlockwiseKernels(BLOCKWISE, native=True), Emulated(BLOCKWISE), sizes)


@pytest.mark.parametrize("sizes", SIZES)
def test_blockwise_products_of_blackwell(sizes: tuple[int, ...]) -> None:
    def with_square(a: Tensor, b: Tensor, a_s: Tensor, b_s: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert a.stride(1) == b.stride(0) == a_s.stride(0) == b_s.stride(0) == 1
        factors = b_s.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (a.float() * a_s.repeat_interleave(128, 1) @ (b.float() * factors)).to(out_dtype)

    def with_rows(a: Tensor, b: Tensor, a_s: Tensor, b_s: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert a.stride(1) == b.stride(0) == a_s.stride(0) == b_s.stride(1) == 1
        return (a.float() * a_s.repeat_interleave(128, 1) @ (b.float() * b_s.repeat_interleave(128, 0))).to(
            out_dtype
        )

    kernels = BlockwiseKernels(BLOCKWISE, native=True)
    kernels.native, kernels._with_square, kernels._with_rows = False, with_square, with_rows
    assert_same(kernels, Emulated(BLOCKWISE), sizes)


def mx_kernels(monkeypatch) -> MXKernels:
    kernels = MXKernels(MXFP8)
    from torchao.prototype.mx_formats.utils import from_blocked

    def values(codes: Tensor, blocked: Tensor) -> Tensor:
        scales = from_blocked(blocked, codes.shape[0], codes.shape[1] // 32)
        return codes.float() * scales.float().repeat_interleave(32, 1)

    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert a.stride(1) == b.stride(0) == 1 and not a.shape[1] % 32 and not b.shape[1] % 16
        return (values(a, scale_a) @ values(b.mT, scale_b).mT).to(out_dtype)

    def grouped(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        assert a.stride(1) == b.stride(1) == 1 and offs.dtype == torch.int32
        starts = [0, *offs.tolist()[:-1]]
        parts = [
            (a[start:end].float() * scale_a[start:end].float().repeat_interleave(32, 1))
            @ (own.mT.float() * scales.float().repeat_interleave(32, 1)).mT
            for start, end, own, scales in zip(starts, offs.tolist(), b, scale_b, strict=True)
        ]
        return torch.cat(parts).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", grouped)
    # Triton's kernels only reorder scales.
    kernels._groups_to_blocked = lambda scales, _: scales
    kernels._experts_to_blocked = lambda scales: scales
    return kernels


@pytest.mark.parametrize("sizes", SIZES)
def test_mx_products_of_blackwell(monkeypatch, sizes: tuple[int, ...]) -> None:
    assert_same(mx_kernels(monkeypatch), Emulated(MXFP8), sizes)


@pytest.mark.parametrize("sizes", SIZES)
def test_grouped_mx_products_of_blackwell(monkeypatch, sizes: tuple[int, ...]) -> None:
    kernels, emulated = mx_kernels(monkeypatch), Emulated(MXFP8)
    groups = RowGroups(torch.tensor([100, 0, 37, 63]))
    rows, weight, grad = operands((1, 200, *sizes[2:]))
    weights = torch.stack([weight * scale for scale in (1, 2, 0.5, 4)])
    for name, left in {"grouped_output": rows[0], "grouped_grad_input": grad[0]}.items():
        found, expected = (
            getattr(kernels, name)(left, weights, groups),
            getattr(emulated, name)(left, weights, groups),
        )
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        assert getattr(kernels, name)(left[:0], weights, groups).shape == (0, expected.shape[1])
