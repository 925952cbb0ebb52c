"""A layer's three products sum quantised values along the correct dimension. Experts do the same, group by group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from forge.model import Experts
from forge.model.experts import RowGroups, grouped_outer
from forge.parallel.float8.formats import FORMATS, Format
from forge.parallel.float8.layers import convert_experts, convert_linear, grouped, linear
from forge.parallel.float8.products import Emulated

BOTH = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def by_hand(form: Format, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return output and both gradients for x `[batch, tokens, in]`, computed by sequence and block."""

    def rounded(one: Tensor, block: tuple[int, int]) -> Tensor:
        found = torch.empty_like(one)
        for top in range(0, one.shape[0], block[0]):
            for left in range(0, one.shape[1], block[1]):
                at = slice(top, top + block[0]), slice(left, left + block[1])
                found[at] = form.rounded(one[at], block, one.dtype)
        return found

    size = form.block
    of_weight = {
        -1: (size, size) if form.square else (1, size),
        -2: (size, size) if form.square else (size, 1),
    }
    y = torch.stack([rounded(one, (1, size)) @ rounded(weight, of_weight[-1]).T for one in x])
    dx = torch.stack([rounded(one, (1, size)) @ rounded(weight, of_weight[-2]) for one in grad])
    dw = sum(rounded(g, (size, 1)).T @ rounded(one, (size, 1)) for g, one in zip(grad, x, strict=True))
    return y, dx, dw


@BOTH
@pytest.mark.parametrize("tokens", [136, 40])
def test_a_linear_layer_and_its_gradients(form: Format, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((2, tokens, 136), (40, 136), (2, tokens, 40))
    )
    x.requires_grad_(), weight.requires_grad_()
    y = linear(x, weight, None, Emulated(form))
    y.backward(grad)
    for found, expected in zip(
        (y, x.grad, weight.grad), by_hand(form, x.detach(), weight.detach(), grad), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(y, x @ weight.T, rtol=1e-6)


@BOTH
def test_tensors_without_requires_grad_get_no_gradient(form: Format) -> None:
    x, weight = torch.randn(1, 4, 32), torch.randn(32, 32, requires_grad=True)
    linear(x, weight, None, Emulated(form)).sum().backward()
    assert x.grad is None and weight.grad is not None


@BOTH
def test_a_converted_layer_adds_its_bias_and_keeps_its_dtype(form: Format) -> None:
    model = nn.Sequential(nn.Linear(64, 48).bfloat16())
    layer, names = model[0], [name for name, _ in model.named_parameters()]
    x = torch.randn(2, 32, 64, dtype=torch.bfloat16)
    without = linear(x, layer.weight, None, Emulated(form))
    convert_linear(model, "0", Emulated(form))
    assert torch.equal(model(x), without + layer.bias) and model(x).dtype == torch.bfloat16
    assert [name for name, _ in model.named_parameters()] == names


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("counts", [[3, 0, 40, 5], [0, 0, 0, 0], [48, 0, 0, 0]])
def test_experts_equal_linear_layers_except_for_their_weight_gradients(
    form: Format, dtype: torch.dtype, counts: list[int]
) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(counts) + 2, 96, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(4, 80, 96, dtype=dtype, generator=generator).requires_grad_()
    products, groups = Emulated(form), RowGroups(torch.tensor(counts))
    found = grouped(rows, weight, groups, products=products)[: sum(counts)]
    parts = rows.detach()[: sum(counts)].split(counts)
    expected = [products.output(part, own.detach()) for part, own in zip(parts, weight, strict=True)]
    torch.testing.assert_close(found, torch.cat(expected))
    if not sum(counts):
        return
    grad = torch.randn(found.shape, dtype=dtype, generator=generator)
    found.backward(grad)
    grads = grad.split(counts)
    of_rows = [products.grad_input(g, own.detach()) for g, own in zip(grads, weight, strict=True)]
    torch.testing.assert_close(rows.grad[: sum(counts)], torch.cat(of_rows))
    torch.testing.assert_close(
        weight.grad, torch.stack([g.T @ part for g, part in zip(grads, parts, strict=True)])
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outer_products_of_groups_leave_out_rows_past_the_last(dtype: torch.dtype) -> None:
    left, right = torch.randn(20, 16).to(dtype), torch.randn(20, 32).to(dtype)
    left[17:] = right[17:] = float("nan")
    found = grouped_outer(left, right, RowGroups(torch.tensor([5, 0, 12])))
    expected = torch.stack(
        [left[:5].T @ right[:5], torch.zeros(16, 32).to(dtype), left[5:17].T @ right[5:17]]
    )
    torch.testing.assert_close(found, expected)
    assert grouped_outer(left[:0], right[:0], RowGroups(torch.zeros(3, dtype=torch.long))).shape == (
        3,
        16,
        32,
    )


@BOTH
def test_converted_experts_use_both_products_and_their_biases(form: Format) -> None:
    experts = Experts(2, 64, 32, bias=True).double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    rows, groups = torch.randn(9, 64, dtype=torch.float64), RowGroups(torch.tensor([4, 5]))
    exact = experts.compute(rows, groups)
    convert_experts(experts, Emulated(form))
    found = experts.compute(rows, groups)
    of_second = experts.compute(rows[4:], RowGroups(torch.tensor([0, 5])))
    torch.testing.assert_close(found[4:], of_second)
    error = (found - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.1
