"""The split product against float64. On a CPU, the product of bfloat16 terms is computed in float32, as on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from forge.model import split_product
from forge.model.split_product import linear, terms


def in_float32(left: Tensor, right: Tensor) -> Tensor:
    assert left.dtype == right.dtype == torch.bfloat16
    return left.float() @ right.float()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_product, "multiply", in_float32)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def relative(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def test_two_terms_hold_a_float32_value() -> None:
    values = drawn(4000) * 10.0 ** torch.linspace(-30, 30, 4000)
    values[:4] = torch.tensor([0.0, -0.0, 1.0, torch.finfo(torch.float32).max])
    high, low = terms(values)
    assert high.dtype == low.dtype == torch.bfloat16
    assert ((high.double() + low.double() - values).abs() <= 2.0**-15 * values.double().abs()).all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_sum_of_terms_stays_not_finite(value: float) -> None:
    high, low = terms(torch.tensor([value]))
    assert not (high + low).isfinite()


@pytest.mark.compiles
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.processes])]
)
@pytest.mark.usefixtures("on_cpu")
def test_values_and_gradients_are_far_closer_than_bfloat16(compiled: bool) -> None:
    x, weight, grad = drawn(2, 50, 96).bfloat16(), drawn(24, 96), drawn(2, 50, 24) * 1e-6

    def found(on_gpu: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
        torch.compiler.reset()
        function = torch.compile(linear, fullgraph=True) if compiled and on_gpu else linear
        of_x = (x if on_gpu else x.to(dtype)).clone().requires_grad_()
        of_weight = weight.to(dtype).clone().requires_grad_()
        out = function(of_x, of_weight, on_gpu)
        return out, *torch.autograd.grad(out, (of_x, of_weight), grad.to(out.dtype))

    out, of_x, of_weight = found(True, torch.float32)
    exact, exact_x, exact_weight = found(False, torch.float64)
    rounded = found(False, torch.bfloat16)
    assert (out.dtype, of_x.dtype, of_weight.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    assert relative(out, exact) < 2e-5 < 1e-3 < relative(rounded[0], exact)
    assert relative(of_weight, exact_weight) < 2e-5
    # The gradient of x is in bfloat16, and has hardly more than the error of this rounding.
    assert_close(of_x, exact_x.bfloat16(), rtol=2.0**-7, atol=1e-9)
    assert relative(of_x, exact_x) < 1.02 * relative(exact_x.bfloat16(), exact_x)


@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float64")]
)
def test_other_dtypes_are_multiplied_as_they_are(dtypes: tuple[str, str]) -> None:
    x, weight = (drawn(3, 8).to(getattr(torch, dtype)) for dtype in dtypes)
    assert torch.equal(linear(x, weight, on_gpu=True), linear(x, weight))


def test_a_cpu_multiplies_in_the_dtype_of_the_weight() -> None:
    x, weight = drawn(3, 8).bfloat16(), drawn(5, 8)
    assert torch.equal(linear(x, weight), x.float() @ weight.t())
