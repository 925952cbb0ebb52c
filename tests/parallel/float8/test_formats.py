"""Codes, scales and rounding against the formats' definitions, for all 256 codes, and bit for bit against torchao."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.parallel.float8.formats import BLOCKWISE, CODES, FORMATS, MXFP8, Format

INF, NAN = float("inf"), float("nan")
BOTH = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def value_of(code: int) -> float:
    """Return an E4M3 code's value by definition (OCP FP8, table 1): bias 7, no infinity, NaN at S.1111.111."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return NAN
    return sign * (2.0**-9 * mantissa if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))


VALUES = torch.tensor([value_of(code) for code in range(256)], dtype=torch.float64)
FINITE = VALUES[~VALUES.isnan()].unique()


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest finite E4M3 number by comparison with all of them. Ties to even, saturating. float64."""
    x = x.clamp(-448, 448)
    above = torch.searchsorted(FINITE, x).clamp(1, len(FINITE) - 1)
    low, high = FINITE[above - 1], FINITE[above]
    even = torch.isin(high, VALUES[(torch.arange(256) & 1) == 0])
    up = (x - low > high - x) | ((x - low == high - x) & even)
    return torch.where(up, high, low)


def blocks_of(form: Format, seed: int, dtype: torch.dtype, rows: int = 16) -> torch.Tensor:
    """Return values over many binades, `[rows, 4 blocks]`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4 * form.block, generator=generator)
    return (x * torch.exp2(8 * torch.randn(rows, 4 * form.block, generator=generator))).to(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@BOTH
def test_all_codes_have_their_defined_values(form: Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(CODES).view(1, 256)
    ones = torch.ones(1, 256 // form.block).to(torch.float8_e8m0fnu if form.powers else torch.float32)
    found = form.dequantise((codes, ones), (1, form.block), torch.float64)
    assert torch.equal(found[0].nan_to_num(nan=1e9), VALUES.nan_to_num(nan=1e9))


def test_all_powers_of_two_of_mx_scales() -> None:
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).view(256, 1)
    ones = torch.ones(256, 32).to(CODES)
    found = MXFP8.dequantise((ones, scales), (1, 32), torch.float64)
    assert found[:255].tolist() == [[2.0 ** (code - 127)] * 32 for code in range(255)]
    assert found[255].isnan().all()


@BOTH
def test_numbers_of_the_format_are_kept(form: Format) -> None:
    """A block with maximum 448, times any power of two, is represented exactly."""
    numbers = VALUES.nan_to_num(nan=448.0).float().view(256 // form.block, form.block).clone()
    numbers[:, 0] = 448
    for power in (-20, 0, 30):
        x = numbers * 2.0**power
        assert torch.equal(form.rounded(x, (1, form.block), torch.float32), x)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(4))
def test_codes_are_the_nearest_ties_to_even(form: Format, dtype: torch.dtype, seed: int) -> None:
    x = blocks_of(form, seed, dtype)
    codes, scales = form.quantise(x, (1, form.block))
    amax = x.float().view(16, 4, form.block).abs().amax(-1)
    if form.powers:
        exponents = torch.tensor([[smallest_power(one) for one in row] for row in amax.tolist()])
        assert torch.equal(scales.double(), torch.exp2(exponents.double()))
        scaled = x.double().view(16, 4, -1).float().double() / scales.double()[..., None]
    else:
        multipliers = (448 / amax.double()).float()
        assert torch.equal(scales, 1 / multipliers)
        scaled = (x.float().view(16, 4, -1) * multipliers[..., None]).double()
    assert torch.equal(codes.double(), nearest(scaled).view(16, -1))


def smallest_power(amax: float) -> int:
    """Return the smallest e with amax / 2^e <= 448."""
    return next(e for e in range(-127, 128) if amax <= 448 * 2.0**e)


@pytest.mark.parametrize("mantissa", [1.0, 1.5, 1.75, 1.75 + 2.0**-23, 2 - 2.0**-23])
@pytest.mark.parametrize("power", [-100, -7, 0, 8, 100])
def test_mx_scales_round_up_exactly_at_the_border(mantissa: float, power: int) -> None:
    x = torch.zeros(1, 32)
    x[0, 5] = mantissa * 2.0**power
    codes, scales = MXFP8.quantise(x, (1, 32))
    assert scales.double().item() == 2.0 ** smallest_power(x[0, 5].item())
    assert codes.double().abs().max() <= 448


@BOTH
def test_no_value_saturates_and_zeros_stay(form: Format) -> None:
    x = blocks_of(form, 9, torch.float32)
    x[3] = 0.0
    found = form.rounded(x, (1, form.block), torch.float64)
    assert (found[3] == 0).all()
    # Half a step in the largest element's binade (2^-4), and half of the smallest step (2^-10 of a scale).
    amax = x.view(16, 4, -1).abs().amax(-1, keepdim=True).expand(16, 4, form.block).reshape_as(x)
    assert ((found - x).abs() <= torch.maximum(x.abs() / 16, amax / 448 * 2.0**-9) * (1 + 1e-6)).all()


@BOTH
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("square", [False, True])
def test_a_non_finite_value_affects_its_block_only(form: Format, bad: float, square: bool) -> None:
    block = (form.block, form.block) if square else (1, form.block)
    x = torch.randn(2 * form.block, 2 * form.block)
    x[1, 3] = bad
    found = form.rounded(x, block, torch.float32)
    there = torch.zeros_like(x, dtype=torch.bool)
    there[: form.block if square else 2, : form.block] = True
    there[0] &= square
    assert not found[1, 3].isfinite()
    assert found[~there].isfinite().all()


@BOTH
@pytest.mark.parametrize("dim", [-1, -2])
def test_a_short_last_block_is_as_if_padded_with_zeros(form: Format, dim: int) -> None:
    x = torch.randn(3, 70, 150)
    padded = torch.nn.functional.pad(x, (0, 256 - 150, 0, 128 - 70))
    for block in (form.along(dim), form.of_weight(dim)):
        codes, scales = form.quantise(x, block)
        wide, wide_scales = form.quantise(padded, block)
        assert same_bits(codes, wide[:, :70, :150])
        assert same_bits(scales, wide_scales[:, : scales.shape[1], : scales.shape[2]])


@BOTH
def test_blocks_do_not_depend_on_the_tensor_around_them(form: Format) -> None:
    x = torch.randn(2, 4 * form.block, 4 * form.block)
    for block in (form.along(-1), form.along(-2), form.of_weight(-1)):
        whole = form.rounded(x, block, torch.float32)
        half = form.rounded(x[1:, 2 * form.block :, form.block : 2 * form.block], block, torch.float32)
        assert torch.equal(whole[1:, 2 * form.block :, form.block : 2 * form.block], half)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_mx_equals_torchao_bit_for_bit(dtype: torch.dtype, seed: int) -> None:
    logging.disable(logging.WARNING)
    try:
        mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
        config = pytest.importorskip("torchao.prototype.mx_formats.config")
    finally:
        logging.disable(logging.NOTSET)
    x = blocks_of(MXFP8, seed, dtype)
    x[2], x[3, 7], x[4, 7] = 0.0, NAN, INF
    scales, codes = mx.to_mx(x, CODES, 32, config.ScaleCalculationMode.RCEIL)
    found = MXFP8.quantise(x, (1, 32))
    assert same_bits(found.codes, codes) and same_bits(found.scales, scales)


def torchao_blockwise() -> dict[str, Any]:
    """Return torchao's reference functions. Their module imports Triton, missing in PyTorch's CPU build."""
    torchao = pytest.importorskip("torchao")
    source = (Path(torchao.__file__).parent / "prototype/blockwise_fp8_training/kernels.py").read_text()
    names: dict[str, Any] = {"torch": torch, "EPS": 1e-12, "e4m3_dtype": CODES, "FP8_E4M3_DTYPES": (CODES,)}
    exec("from typing import Tuple", names)
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("torch_blockwise"):
            exec(ast.unparse(node), names)
    return names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_blockwise_equals_torchao_bit_for_bit(dtype: torch.dtype, seed: int) -> None:
    theirs = torchao_blockwise()
    x = blocks_of(BLOCKWISE, seed, dtype, rows=256)
    x[:2] = 0.0
    for function, block in (
        ("act_quant_lhs", BLOCKWISE.along(-1)),
        ("act_quant_rhs", BLOCKWISE.along(-2)),
        ("weight_quant", BLOCKWISE.of_weight(-1)),
    ):
        codes, scales = theirs[f"torch_blockwise_scale_{function}"](x)
        found = BLOCKWISE.quantise(x, block)
        assert same_bits(found.codes, codes) and same_bits(found.scales, scales), function
