"""Rows in float8: rounding keeps what codes can hold, and nodes exchange 33 bytes for 32 values."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.collectives import collectives_of
from forge.parallel.dispatch import NodeDispatcher
from forge.parallel.float8.rows import RoundedRows, decode, encode, rounded
from tests.support.harness import run_ranks

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def values(n: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values of many magnitudes, with zeros."""
    generator = torch.Generator().manual_seed(n + dim)
    x = torch.randn(n, dim, generator=generator) * torch.exp(8 * torch.randn(n, dim, generator=generator))
    return x.masked_fill(torch.rand(n, dim, generator=generator) < 0.1, 0.0).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "dim"), [(500, 64), (40, 100), (3, 7), (0, 64)])
def test_codes_lose_nothing_of_rounded_rows(n: int, dim: int, dtype: torch.dtype) -> None:
    x = values(n, dim, dtype)
    once = rounded(x)
    codes = encode(once)
    assert codes.dtype == torch.uint8 and codes.shape == (n, dim + -(-dim // 32))
    assert once.dtype == dtype and torch.equal(decode(codes, dim, dtype), once)
    assert torch.equal(rounded(once), once)
    if n:
        assert not torch.equal(once, x)
        error = (once - x).float().abs().unflatten(-1, (-1, 32)) if dim % 32 == 0 else None
        if error is not None:
            largest = x.float().abs().unflatten(-1, (-1, 32)).amax(-1, keepdim=True)
            assert (error <= largest / 16).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_value_that_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    for value in (float("nan"), float("inf")):
        x = values(4, 64, dtype)
        x[1, 3] = value
        for one in (rounded(x), decode(encode(x), 64, dtype)):
            assert not one[1, 3].isfinite() and one[1, 32:].isfinite().all() and one[0].isfinite().all()


def test_values_are_rounded_forward_and_gradients_backward() -> None:
    rounding, x = RoundedRows(), values(20, 64, torch.float64).requires_grad_()
    weight = values(20, 64, torch.float64)
    (rounding.values(x) * weight).sum().backward()
    assert torch.equal(x.grad, weight) and torch.equal(rounding.values(x), rounded(x))
    x.grad = None
    out = rounding.gradients(x)
    (out * weight).sum().backward()
    assert torch.equal(out, x) and torch.equal(x.grad, rounded(weight))


N_EXPERTS, DIM, TOP_K = 4, 64, 2


def _exchanges(rank: int, world: int) -> list[list[int]]:
    """Return the bytes of each all-to-all of a NodeDispatcher's forward and backward: without rounding, and with it."""
    across = dist.new_subgroups_by_enumeration([[0, 1]])[0]
    within = dist.new_subgroups_by_enumeration([[0], [1]])[0]
    node = NodeDispatcher(across, within, N_EXPERTS)
    generator = torch.Generator().manual_seed(rank)
    x = rounded(torch.randn(16, DIM, generator=generator)).bfloat16().requires_grad_()
    experts = torch.rand(16, N_EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
    weights = torch.rand(16, TOP_K, generator=generator)

    def step() -> None:
        x.grad = None
        out = node(x, experts, weights, lambda rows, counts: 2 * rows)
        results.append(out.detach())
        out.backward(x.detach())  # rounded, as the gradients of a MoE with rounding
        results.append(x.grad)

    results: list[torch.Tensor] = []
    found = []
    for rounding in (None, RoundedRows()):
        if rounding is not None:
            node.send_rows = node.send_gradients = rounding.send
        found.append(collectives_of(step).sizes("all_to_all"))
    out, grad, out_by_codes, grad_by_codes = results
    assert torch.equal(out, out_by_codes) and torch.equal(grad, grad_by_codes)
    return found


@pytest.mark.processes
def test_nodes_exchange_codes_in_two_of_four_directions() -> None:
    for plain, coded in run_ranks(_exchanges, 2):
        ratios = [after / before for before, after in zip(plain, coded, strict=True)]
        assert ratios.count(33 / 64) == 2 and ratios.count(1.0) == len(ratios) - 2
