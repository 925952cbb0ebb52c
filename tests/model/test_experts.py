"""Grouped products against one product per expert, and the dispatch and combination of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import metrics
from torch.nn import functional as F
from torch.testing import assert_close

from forge.model import Experts
from forge.model import experts as module
from forge.model.dispatch import (
    EAGER,
    Kernels,
    LocalDispatcher,
    combine,
    count_by_expert,
    group_by_expert,
    permute,
    sort_by_expert,
    spread,
    spread_rows,
)
from forge.model.experts import RowGroups
from forge.model.host import HostReads

DIM, HIDDEN, EXPERTS = 16, 8, 5
COUNTS = {
    "uneven": [3, 1, 7, 2, 4],
    "an expert without rows": [5, 0, 4, 0, 3],
    "all rows to one": [0, 0, 0, 9, 0],
    "one row": [0, 1, 0, 0, 0],
    "no rows": [0, 0, 0, 0, 0],
}


def make_experts(dtype: torch.dtype, dim: int = DIM, hidden: int = HIDDEN) -> Experts:
    generator = torch.Generator().manual_seed(0)
    experts = Experts(EXPERTS, dim, hidden)
    for weight in experts.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return experts.to(dtype)


def one_by_one(experts: Experts, rows: Tensor, counts: list[int]) -> Tensor:
    outputs = []
    for own, w13, w2 in zip(rows.split(counts), experts.w13, experts.w2, strict=True):
        gate, up = (own @ w13.T).chunk(2, -1)
        outputs.append((F.silu(gate) * up) @ w2.T)
    return torch.cat(outputs)


def assert_equals_one_by_one(dtype: torch.dtype, tolerance: float, counts: list[int], device: str) -> None:
    results = []
    for grouped in (True, False):
        experts = make_experts(dtype if grouped else torch.float64).to(device)
        rows = torch.randn(sum(counts), DIM, generator=torch.Generator().manual_seed(1)).to(experts.w2)
        rows.requires_grad_()
        on_device = torch.tensor(counts, device=device)
        out = experts.compute(rows, RowGroups(on_device)) if grouped else one_by_one(experts, rows, counts)
        (out * torch.linspace(-1, 1, DIM).to(out)).sum().backward()
        results.append([tensor.double() for tensor in (out, rows.grad, experts.w13.grad, experts.w2.grad)])
    for ours, plain in zip(*results, strict=True):
        assert_close(ours, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
def test_a_grouped_product_equals_a_loop_over_groups(
    dtype: torch.dtype, tolerance: float, counts: list[int]
) -> None:
    assert_equals_one_by_one(dtype, tolerance, counts, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_on_cuda_groups_may_have_any_number_of_rows(
    dtype: torch.dtype, tolerance: float, counts: list[int]
) -> None:
    assert_equals_one_by_one(dtype, tolerance, counts, "cuda")


@pytest.mark.parametrize(
    ("dtype", "dim", "grouped"),
    [
        (torch.float32, 16, True),
        (torch.float32, 12, True),
        (torch.float32, 14, False),
        (torch.bfloat16, 16, True),
        (torch.bfloat16, 12, False),
        (torch.float64, 16, False),
    ],
)
def test_supported_shapes_are_one_grouped_product_without_padding(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dim: int, grouped: bool
) -> None:
    kernel, seen = module._grouped_mm, []

    def spy(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        seen.append((tuple(rows.shape), offs.tolist()))
        return kernel(rows, weight, offs=offs)

    monkeypatch.setattr(module, "_grouped_mm", spy)
    groups = RowGroups(torch.tensor([0, 1, 8, 0, 0]))
    out = make_experts(dtype, dim).compute(torch.randn(9, dim).to(dtype), groups)
    assert out.shape == (9, dim)
    assert seen == ([((9, dim), [0, 1, 9, 9, 9]), ((9, HIDDEN), [0, 1, 9, 9, 9])] if grouped else [])


def test_a_layer_without_a_grouped_kernel_reads_its_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, tolist = [], Tensor.tolist
    monkeypatch.setattr(module, "has_kernel", lambda rows, weight: False)
    monkeypatch.setattr(Tensor, "tolist", lambda x: waits.append(x.shape) or tolist(x))
    experts = make_experts(torch.float32)
    rows, counts = torch.randn(9, DIM, requires_grad=True), torch.tensor([0, 1, 8, 0, 0])
    kept = HostReads().kept
    for _ in range(2):  # forward, and recomputation
        with kept():
            experts.compute(rows, RowGroups(counts)).sum().backward()
    assert waits == [(EXPERTS,)]


def test_a_rank_without_rows_calls_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "_grouped_mm")
    experts, rows = make_experts(torch.bfloat16), torch.zeros(0, DIM, dtype=torch.bfloat16)
    experts.compute(
        rows.requires_grad_(), RowGroups(torch.zeros(EXPERTS, dtype=torch.int64))
    ).sum().backward()
    assert rows.grad is not None and rows.grad.shape == (0, DIM)
    assert experts.w13.grad is not None and not experts.w13.grad.any()


def test_a_plan_sorts_choices_by_expert_in_the_order_of_tokens() -> None:
    plan = sort_by_expert(torch.tensor([[2, 0], [0, 1], [3, 0], [2, 3]]), n_experts=3)
    assert plan.order.tolist() == [1, 2, 5, 3, 0, 6, 4, 7]  # choices of expert 3 (no expert) come last
    assert plan.counts.tolist() == [3, 1, 2] and plan.ends.tolist() == [3, 4, 6]
    assert torch.equal(plan.order[plan.places.flatten()], torch.arange(8))


def random_choices(tokens: int, top_k: int, none: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    experts = torch.rand(tokens, EXPERTS + none, generator=generator).argsort(-1)[:, :top_k]
    return experts, torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("none", [False, True], ids=["all", "some without an expert"])
def test_counting_gives_the_same_plan_as_sorting(none: bool) -> None:
    experts, _ = random_choices(40, 3, none)
    if none:
        experts[:7, 1:] = EXPERTS  # two choices of a token without an expert
    for counted, by_sorting in zip(
        count_by_expert(experts, EXPERTS), sort_by_expert(experts, EXPERTS), strict=True
    ):
        assert torch.equal(counted, by_sorting)


@pytest.mark.compiles
def test_compiled_dispatch_accepts_a_rank_without_tokens() -> None:
    def rows(x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        spread, plan = spread_rows(x, experts, EXPERTS)
        return spread, plan.counts

    torch._dynamo.reset()
    compiled = torch.compile(rows, backend="aot_eager", fullgraph=True)
    for tokens in (0, 6, 9, 0):  # as first size, and after others
        experts, _ = random_choices(tokens, 3)
        x = torch.randn(tokens, DIM)
        assert_close(compiled(x, experts), rows(x, experts))


def test_rows_of_several_ranks_are_grouped_by_expert_in_the_order_of_ranks() -> None:
    arriving = torch.tensor([[2, 0, 1], [1, 3, 0], [0, 0, 0], [2, 1, 4]])
    experts = torch.arange(3).repeat(4).repeat_interleave(arriving.flatten())
    expected = sort_by_expert(experts.unsqueeze(1), 3)
    order, places, counts, ends = group_by_expert(arriving, 14)
    assert torch.equal(order, expected.order) and torch.equal(places, expected.places.squeeze(1))
    assert torch.equal(counts, expected.counts) and torch.equal(ends, expected.ends)


def test_spread_permute_and_combine_have_the_right_gradients() -> None:
    experts, weights = random_choices(6, 3)
    plan = sort_by_expert(experts, EXPERTS)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(18, 4, dtype=torch.float64, requires_grad=True)
    assert torch.equal(spread(x, experts, EXPERTS)[0], x[plan.order // 3])
    torch.autograd.gradcheck(lambda x: spread(x, experts, EXPERTS)[0], x)
    torch.autograd.gradcheck(lambda rows: permute(rows, plan.order, plan.places.flatten()), rows)
    torch.autograd.gradcheck(lambda *a: combine(*a, plan), (rows, weights.requires_grad_()))


def test_sums_over_experts_are_in_float32() -> None:
    """Many small addends to a large one: bfloat16 would round away each of them."""
    experts, _ = random_choices(2, EXPERTS)
    plan = sort_by_expert(experts, EXPERTS)
    rows = torch.full((10, 4), 2.0**-8).bfloat16()
    rows[plan.places[:, 0]] = 1.0
    total = combine(rows, torch.ones(2, EXPERTS), plan)
    assert total.dtype == torch.bfloat16 and (total == torch.tensor(1 + 4 * 2.0**-8).bfloat16()).all()
    x = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    spread(x, experts, EXPERTS)[0].backward(rows)
    assert torch.equal(x.grad, total)


INDUCTOR = [pytest.mark.slow, pytest.mark.processes]


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("aot_eager", torch.float64),
        pytest.param("inductor", torch.float64, marks=INDUCTOR),
        pytest.param("inductor", torch.bfloat16, marks=INDUCTOR),
    ],
)
def test_compiled_kernels_equal_eager_ones(backend: str, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    compiled = Kernels(*(torch.compile(function, backend=backend, fullgraph=True) for function in EAGER))
    for tokens in (6, 9):  # the second time with a dynamic size
        experts, weights = random_choices(tokens, 3)
        arriving = (
            torch.bincount(experts.flatten(), minlength=EXPERTS).view(EXPERTS, 1).expand(-1, 2).contiguous()
        )
        found = []
        for kernels in (EAGER, compiled):
            generator = torch.Generator().manual_seed(3)
            x, rows = (
                torch.randn(n, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
                for n in (tokens, 3 * tokens)
            )
            own = weights.clone().requires_grad_()
            spread_x, plan = spread(x, experts, EXPERTS, kernels)
            total = combine(rows * spread_x, own, plan, kernels)
            total.backward(torch.linspace(-1, 1, total.numel()).view_as(total).to(dtype))
            grouped = kernels.group(arriving, 6 * tokens)
            found.append((total, x.grad, rows.grad, own.grad, *plan, *grouped))
        for eager, of_compiler in zip(*found, strict=True):
            assert_close(of_compiler, eager, rtol=0.02 if dtype == torch.bfloat16 else 1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.compiles
def test_each_compiled_sum_is_one_pass() -> None:
    torch.compiler.reset()
    experts, weights = random_choices(64, 3)
    plan, rows, grad = sort_by_expert(experts, EXPERTS), torch.randn(192, 16), torch.randn(64, 16)
    passes = []
    for function, inputs in (
        (EAGER.add, (rows, plan.places)),
        (EAGER.weigh, (rows, weights, plan.places)),
        (EAGER.weigh_backward, (grad, rows, weights, plan.order, plan.places)),
    ):
        metrics.reset()
        torch.compile(function, backend="inductor", fullgraph=True)(*inputs)
        passes.append(metrics.generated_kernel_count)
    # The second kernel of backward computes the gradient of the weights.
    assert passes == [1, 1, 2]


@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
def test_dispatch_equals_a_loop_over_tokens(top_k: int) -> None:
    experts, weights = random_choices(7, top_k)
    own = make_experts(torch.float64)
    x = torch.randn(7, DIM, dtype=torch.float64)
    out = LocalDispatcher(EXPERTS, drops=False)(x, experts, weights, own.compute)
    for t in range(7):
        expected = torch.zeros(DIM, dtype=torch.float64)
        for e, weight in zip(experts[t].tolist(), weights[t], strict=True):
            counts = [0] * EXPERTS
            counts[e] = 1
            expected += weight * one_by_one(own, x[t : t + 1], counts)[0]
        assert_close(out[t], expected)


class Garbage(torch.autograd.Function):
    """Write NaN after `kept` rows in forward and backward, like uninitialised memory."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, kept: int) -> Tensor:
        ctx.kept = kept
        rows = rows.clone()
        rows[kept:] = torch.nan
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        grad[ctx.kept :] = torch.nan
        return grad, None


def test_dropped_choices_are_not_computed_and_have_no_effect() -> None:
    experts, weights = random_choices(9, 3, none=True)
    assert (experts == EXPERTS).any()
    own = make_experts(torch.float64)
    kept = int((experts < EXPERTS).sum())

    def compute(rows: Tensor, groups: RowGroups) -> Tensor:
        assert groups.counts.sum() == kept
        return Garbage.apply(own.compute(Garbage.apply(rows, kept), groups), kept)

    results = []
    for drops in (True, False):
        x = torch.randn(9, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        x.requires_grad_()
        w = weights.clone().requires_grad_()
        own.zero_grad()
        if drops:
            out = LocalDispatcher(EXPERTS, drops=True)(x, experts, w, compute)
        else:  # the reference: weights of zero, computed in full
            full = w.masked_fill(experts == EXPERTS, 0.0)
            out = LocalDispatcher(EXPERTS, drops=False)(x, experts.clamp(max=EXPERTS - 1), full, own.compute)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, w.grad, own.w13.grad.clone(), own.w2.grad.clone()])
    for ours, plain in zip(*results, strict=True):
        assert_close(ours, plain)
