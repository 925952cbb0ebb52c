"""Dispatch tokens to their experts and back within one process, without padding and without host syncs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.model.experts import RowGroups
from forge.model.norm import promoted


class Dispatcher(Protocol):
    """Sends tokens through their experts. The parameterless inner part of `MoE`, and an extension point."""

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, compute: Callable[[Tensor, RowGroups], Tensor]
    ) -> Tensor:
        """x `[tokens, dim]` -> for each token the weighted sum of its experts' outputs, `[tokens, dim]`.

        experts int64 and weights `[tokens, top_k]`; expert index n_experts means no expert and contributes nothing.
        compute: (rows `[n, dim]` sorted by expert, one group for each expert) -> `[n, dim]`. n may exceed the rows of
        the groups; output rows past the last group are undefined.
        """


class LocalDispatcher:
    """A dispatcher for a process with all experts. drops: True if some choices may have no expert."""

    def __init__(self, n_experts: int, drops: bool):
        self.n_experts, self.drops = n_experts, drops
        self.kernels = EAGER

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, compute: Callable[[Tensor, RowGroups], Tensor]
    ) -> Tensor:
        rows, plan = spread(x, experts, self.n_experts, self.kernels)
        groups = RowGroups(plan.counts, plan.ends)
        if not self.drops:
            return combine(compute(rows, groups), weights, plan, self.kernels)
        # Choices without an expert are sorted last, and `compute` leaves their rows uninitialised. The second fill
        # keeps these values out of the output, the first fill keeps them out of the gradients.
        past = (torch.arange(rows.shape[0], device=x.device) >= plan.counts.sum()).unsqueeze(-1)
        rows = compute(rows.masked_fill(past, 0.0), groups)
        return combine(rows.masked_fill(past, 0.0), weights, plan, self.kernels)


class DispatchPlan(NamedTuple):
    """The order of rows sorted by expert. There is one row per choice (a token and one of its experts).

    Choice j of token t has number t * top_k + j. order: the number of each row's choice, int64 `[tokens * top_k]`.
    places: the row of each choice, int64 `[tokens, top_k]`. counts: the number of rows of each expert, int64
    `[n_experts]`. ends: the end of each expert's rows, int32 `[n_experts]`. The sort is stable. Choices without an
    expert come last.
    """

    order: Tensor
    places: Tensor
    counts: Tensor
    ends: Tensor


def sort_by_expert(experts: Tensor, n_experts: int) -> DispatchPlan:
    """Return the plan for experts int64 `[tokens, top_k]`, computed by sorting. Values are 0 to n_experts (no expert)."""
    by_expert, order = experts.flatten().sort(stable=True)
    # Counts by bisection, because bincount's output has no static size, so it would synchronise with the device.
    begins = torch.searchsorted(by_expert, torch.arange(n_experts + 1, device=order.device))
    return DispatchPlan(order, _inverse(order).view_as(experts), begins.diff(), begins[1:].int())


def count_by_expert(experts: Tensor, n_experts: int) -> DispatchPlan:
    """Return the plan of `sort_by_expert`, computed by counting. This takes a few passes if compiled, and is slow if not.

    No token may choose an expert twice. Only n_experts (no expert) may be repeated.
    """
    indices = torch.arange(n_experts + 1, device=experts.device).unsqueeze(1)
    chosen = [(column == indices).int() for column in experts.unbind(1)]  # each [n_experts + 1, tokens]
    upto = sum(chosen[1:], chosen[0]).cumsum(1, dtype=torch.int32)
    counts = upto[:, -1].long()
    ends = counts.cumsum(0, dtype=torch.int32)
    # The number of a token's later choices of the same expert. Only n_experts (no expert) is repeated.
    choice = torch.arange(experts.shape[1], device=experts.device)
    later = (experts.unsqueeze(2) == experts.unsqueeze(1)) & (choice > choice.unsqueeze(1))
    rank = upto.t().gather(1, experts) - later.sum(2) - 1
    places = (ends - counts)[experts] + rank
    return DispatchPlan(_inverse(places.flatten()), places, counts[:-1], ends[:-1])


def plan_rows(experts: Tensor, n_experts: int) -> DispatchPlan:
    """Return the plan for experts int64 `[tokens, top_k]`. Compiled code counts, eager code sorts.

    Without tokens, compiled code sorts too: counting would read the counts from the last token, which does not exist.
    """
    by_counting = torch.compiler.is_compiling() and experts.shape[0] > 0
    return (count_by_expert if by_counting else sort_by_expert)(experts, n_experts)


def spread_rows(x: Tensor, experts: Tensor, n_experts: int) -> tuple[Tensor, DispatchPlan]:
    """x `[tokens, dim]`, experts int64 `[tokens, top_k]` -> rows `[tokens * top_k, dim]` sorted by expert, and the plan."""
    plan = plan_rows(experts, n_experts)
    return x.index_select(0, plan.order // experts.shape[1]), plan


def group_by_expert(arriving: Tensor, total: int) -> DispatchPlan:
    """Return the plan that reorders `total` received rows from (rank, expert) order to expert order.

    arriving int64 `[ranks, local experts]`: number of rows from each rank for each expert. Each row counts as a token
    with one choice, so the plan's places are `[total]`.
    """
    sizes, by_expert = arriving.flatten(), arriving.t()
    # When compiled, one scan over two rows is one launch. A stack would be written to memory before the scan.
    rows = torch.arange(2, device=arriving.device).unsqueeze(1)
    ends, sorted_ends = torch.where(rows == 0, sizes, by_expert.flatten()).cumsum(1).unbind()
    ends_by_expert = sorted_ends.view_as(by_expert)
    before = ends_by_expert - by_expert
    bounds = before[:, 0], ends_by_expert[:, -1]
    index = torch.arange(total, device=arriving.device)
    block = torch.searchsorted(ends, index, right=True)
    places = index + (before.t().flatten() - (ends - sizes))[block]
    return DispatchPlan(_inverse(places), places, bounds[1] - bounds[0], bounds[1].int())


def _inverse(permutation: Tensor) -> Tensor:
    """Return the inverse of `permutation` int64 `[n]`."""
    index = torch.arange(permutation.numel(), device=permutation.device)
    inverse = torch.empty_like(permutation)
    inverse[permutation] = index
    return inverse


def _at(rows: Tensor, column: Tensor, missing: bool) -> Tensor:
    """Return `rows[column]`. missing: True if indices past the last row are allowed; they give zeros."""
    if not missing:
        return rows.index_select(0, column)
    if rows.shape[0] == 0:
        return rows.new_zeros(column.shape[0], rows.shape[1])
    found = rows.index_select(0, column.clamp(max=rows.shape[0] - 1))
    return found.masked_fill((column >= rows.shape[0]).unsqueeze(-1), 0.0)


def add_choices(rows: Tensor, places: Tensor) -> Tensor:
    """rows `[n, dim]` -> for each token the sum of its choices' rows, `[tokens, dim]`.

    Sums are in the wider of float32 and the dtype of rows. places int64 `[tokens, top_k]`; places >= n have no row and
    contribute nothing.
    """
    missing = rows.shape[0] < places.numel()
    total = _at(rows, places[:, 0], missing).to(promoted(rows.dtype))
    for column in places.unbind(1)[1:]:
        total += _at(rows, column, missing)
    return total.to(rows.dtype)


def weigh_choices(rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Like `add_choices`, with each row multiplied by its weight. weights `[tokens, top_k]`."""
    missing = rows.shape[0] < places.numel()
    total = torch.zeros(places.shape[0], rows.shape[1], dtype=promoted(rows.dtype), device=rows.device)
    for column, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
        total.addcmul_(_at(rows, column, missing), weight.unsqueeze(-1).to(total.dtype))
    return total.to(rows.dtype)


def weigh_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `weigh_choices` with respect to rows and weights.

    grad: gradient of the result of `weigh_choices`, `[tokens, dim]`.
    """
    grad = grad.to(promoted(rows.dtype))
    missing = rows.shape[0] < places.numel()
    if missing or torch.compiler.is_compiling():
        # A compiler fuses this form into one pass over the rows. In eager code its temporaries `[n, dim]` have the
        # promoted dtype.
        order = order[: rows.shape[0]]
        of_rows = grad.index_select(0, order // places.shape[1])
        own = weights.flatten().index_select(0, order).unsqueeze(-1)
        # Choices without a row have gradient 0.
        of_choices = (torch.zeros_like if missing else torch.empty_like)(weights).flatten()
        of_choices[order] = (of_rows * rows).sum(-1).to(weights.dtype)
        return (of_rows * own).to(rows.dtype), of_choices.view_as(places)
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    for j, (column, weight) in enumerate(zip(places.unbind(1), weights.unbind(1), strict=True)):
        grad_rows.index_copy_(0, column, (grad * weight.unsqueeze(-1)).to(rows.dtype))
        grad_weights[:, j] = (grad * rows.index_select(0, column)).sum(-1)
    return grad_rows, grad_weights


class Kernels(NamedTuple):
    """Functions with which dispatchers move and add rows. `apply_blocks` replaces them with compiled functions."""

    plan: Callable[..., DispatchPlan] = plan_rows
    spread: Callable[..., tuple[Tensor, DispatchPlan]] = spread_rows
    group: Callable[..., DispatchPlan] = group_by_expert
    add: Callable[..., Tensor] = add_choices
    weigh: Callable[..., Tensor] = weigh_choices
    weigh_backward: Callable[..., tuple[Tensor, Tensor]] = weigh_backward


EAGER = Kernels()


def spread(
    x: Tensor, experts: Tensor, n_experts: int, kernels: Kernels = EAGER
) -> tuple[Tensor, DispatchPlan]:
    """x `[tokens, dim]`, experts int64 `[tokens, top_k]` -> rows `[tokens * top_k, dim]` sorted by expert, and the plan."""
    rows, *plan = _Spread.apply(x, experts, n_experts, kernels)
    return rows, DispatchPlan(*plan)


def take(x: Tensor, plan: DispatchPlan, n: int, kernels: Kernels = EAGER) -> Tensor:
    """x `[tokens, dim]` -> the first `n` rows of the plan, `[n, dim]`, each a copy of its token."""
    return _Take.apply(x, plan.order, plan.places, n, kernels)


def add_up(rows: Tensor, plan: DispatchPlan, kernels: Kernels = EAGER) -> Tensor:
    """rows `[n, dim]`, the plan's first n rows -> for each token the sum of its choices' rows, `[tokens, dim]`."""
    return _AddUp.apply(rows, plan.order, plan.places, kernels)


def combine(rows: Tensor, weights: Tensor, plan: DispatchPlan, kernels: Kernels = EAGER) -> Tensor:
    """rows `[n, dim]` sorted by expert, weights `[tokens, top_k]` -> weighted sums `[tokens, dim]`.

    n is at most tokens * top_k; choices with places >= n contribute nothing. The result has the dtype of rows. Sums are
    in the wider of float32 and this dtype. They add one choice at a time, so no tensor `[tokens, top_k, dim]` exists.
    """
    return _Combine.apply(rows, weights, plan.order, plan.places, kernels)


def permute(rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """rows `[n, dim]` -> `rows[order]`. order and places, int64 `[n]`, are inverse permutations."""
    return _Permute.apply(rows, order, places)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: Tensor, n_experts: int, kernels: Kernels) -> tuple[Tensor, ...]:
        rows, plan = kernels.spread(x, experts, n_experts)
        ctx.mark_non_differentiable(*plan)
        ctx.set_materialize_grads(False)  # no zeros for the plan's tensors in backward
        ctx.save_for_backward(plan.places)
        ctx.kernels = kernels
        return rows, *plan

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_plan: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # index_select's own backward adds atomically, and in the compute dtype.
        return None if grad is None else ctx.kernels.add(grad, *ctx.saved_tensors), None, None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, n: int, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(places)
        ctx.kernels = kernels
        return x.index_select(0, order[:n] // places.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.kernels.add(grad, *ctx.saved_tensors), None, None, None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(order[: rows.shape[0]] // places.shape[1])
        return kernels.add(rows, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad.index_select(0, *ctx.saved_tensors), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, places: Tensor, kernels: Kernels
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, order, places)
        ctx.kernels = kernels
        return kernels.weigh(rows, weights, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *ctx.kernels.weigh_backward(grad, *ctx.saved_tensors), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad.index_select(0, *ctx.saved_tensors), None, None
