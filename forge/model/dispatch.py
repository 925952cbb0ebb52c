"""Tokens to their experts and back, within one process; nothing is padded and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.model.precision import promoted


class Dispatcher(Protocol):
    """Brings tokens to the experts; the parameterless inner part of `MoE`."""

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """x `[tokens, dim]` -> for each token the sum of its experts' outputs times its weights, `[tokens, dim]`.

        experts int64 and weights `[tokens, top_k]`; an expert that is not there (n_experts) adds nothing.
        compute: (rows `[n, dim]` sorted by expert, counts int64 `[experts]`) -> `[n, dim]`; `counts` may end before
        the rows do, what is computed past its end is undefined.
        """


class LocalDispatcher:
    """All experts are here. `drops`: some choices may go to no expert."""

    def __init__(self, n_experts: int, drops: bool):
        self.n_experts, self.drops = n_experts, drops

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        plan = sort_by_expert(experts, self.n_experts)
        rows = spread(x, plan)
        if not self.drops:
            return combine(compute(rows, plan.counts), weights, plan)
        # Choices that go nowhere are sorted last, past the end of what is computed: whatever memory holds there
        # must enter neither the outputs nor, through the first fill, the gradients.
        past = (torch.arange(rows.shape[0], device=x.device) >= plan.counts.sum()).unsqueeze(-1)
        rows = compute(rows.masked_fill(past, 0.0), plan.counts)
        return combine(rows.masked_fill(past, 0.0), weights, plan)


class Plan(NamedTuple):
    """The order of choices by expert, stable; choice j of token t has number t * top_k + j.

    order: int64 `[tokens * top_k]`, the choice behind each row. places: int64 `[tokens, top_k]`, the row of each choice.
    counts: int64 `[n_experts]`, rows of each expert; choices of no expert come after all of them.
    """

    order: Tensor
    places: Tensor
    counts: Tensor


def sort_by_expert(experts: Tensor, n_experts: int) -> Plan:
    """The plan for experts int64 `[tokens, top_k]`, each in 0 ... n_experts, the last for none."""
    by_expert, order = experts.flatten().sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    # Counted by bisection: bincount's output has no static size, and on CUDA the host waits for it.
    bounds = torch.arange(n_experts + 1, device=order.device)
    counts = torch.searchsorted(by_expert, bounds).diff()
    return Plan(order, places.view_as(experts), counts)


def spread(x: Tensor, plan: Plan) -> Tensor:
    """x `[tokens, dim]` -> rows `[tokens * top_k, dim]` by expert. With top_k = 1 a plain permutation."""
    return _Spread.apply(x, plan.order, plan.places)


def combine(rows: Tensor, weights: Tensor, plan: Plan) -> Tensor:
    """rows `[tokens * top_k, dim]` by expert, weights `[tokens, top_k]` -> weighted sums `[tokens, dim]` in rows' dtype.

    Summed in promote(float32, rows), one choice at a time, so that no `[tokens, top_k, dim]` exists in that dtype.
    """
    return _Combine.apply(rows, weights, plan.places)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, order // places.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # index_select's own backward adds atomically and in the compute dtype.
        (places,) = ctx.saved_tensors
        total = grad.index_select(0, places[:, 0]).to(promoted(grad.dtype))
        for column in places.unbind(1)[1:]:
            total += grad.index_select(0, column)
        return total.to(grad.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, places)
        total = torch.zeros(places.shape[0], rows.shape[1], dtype=promoted(rows.dtype), device=rows.device)
        for column, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
            total.addcmul_(rows.index_select(0, column), weight.unsqueeze(-1).to(total.dtype))
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weights, places = ctx.saved_tensors
        grad = grad.to(promoted(rows.dtype))
        grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
        for j, (column, weight) in enumerate(zip(places.unbind(1), weights.unbind(1), strict=True)):
            grad_rows.index_copy_(0, column, (grad * weight.unsqueeze(-1)).to(rows.dtype))
            grad_weights[:, j] = (grad * rows.index_select(0, column)).sum(-1)
        return grad_rows, grad_weights, None
