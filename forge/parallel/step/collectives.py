"""Differentiable collectives for forwards: each pairs the collective of forward with the collective of its gradient.

Tensor parallelism splits activations `[batch, seq, ...]` along the sequence (dimension 1) or keeps them whole on every
rank. If the ranks divide the work on a whole tensor, each rank has a partial gradient, and the partial gradients must be
summed. If all ranks do the same work, each has the whole gradient. Below, pieces are `[batch, seq / tp, ...]`.

These are functional collectives: torch.compile traces them, and CommDebugMode sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from forge.runtime import compat

SEQUENCE = 1


def gather_for_parts(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """All-gather pieces of the sequence, for work that the ranks divide. Backward reduce-scatters the gradient."""
    return _Paired.apply(x, mesh, _all_gather, _reduce_scatter)


def gather_for_all(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """All-gather pieces of the sequence, for work done in full by every rank.

    Backward keeps this rank's piece of the gradient.
    """
    return _Paired.apply(x, mesh, _all_gather, _own_piece)


def share(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the replicated `x` unchanged, for work that the ranks divide. Backward all-reduces the gradient."""
    return _Paired.apply(x, mesh, _unchanged, sum_over)


def sum_to_pieces(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Reduce-scatter `[batch, seq, ...]` along the sequence. Backward all-gathers the gradient."""
    return _Paired.apply(x, mesh, _reduce_scatter, _all_gather)


def sum_to_all(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """All-reduce `x`. Backward returns the gradient unchanged."""
    return _Paired.apply(x, mesh, sum_over, _unchanged)


def own_piece(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's piece of the replicated `x`. No collective in forward. Backward all-gathers the gradient."""
    return _Paired.apply(x, mesh, _own_piece, _all_gather)


def sum_over(x: Tensor, ranks: DeviceMesh | dist.ProcessGroup) -> Tensor:
    """Return the all-reduced sum of `x` over `ranks`. Not differentiable."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", ranks))


class _Paired(torch.autograd.Function):
    """Autograd function with the collective `there` in forward and the collective `back` in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mesh: DeviceMesh, there: Callable[..., Tensor], back: Callable[..., Tensor]
    ) -> Tensor:
        ctx.mesh, ctx.back = mesh, back
        return there(x, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.back(grad, ctx.mesh), None, None, None


def _all_gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return functional.wait_tensor(compat.all_gather_single(x.contiguous(), SEQUENCE, mesh))


def _reduce_scatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return functional.wait_tensor(compat.reduce_scatter_single(x.contiguous(), "sum", SEQUENCE, mesh))


def _own_piece(x: Tensor, mesh: DeviceMesh) -> Tensor:
    size = x.shape[SEQUENCE] // mesh.size()
    return x.narrow(SEQUENCE, mesh.get_local_rank() * size, size).contiguous()


def _unchanged(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return x.view_as(x)
