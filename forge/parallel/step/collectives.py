"""Collectives inside a forward, each with the collective of its gradient.

Tensor parallelism splits activations `[batch, seq, ...]` along the sequence (axis 1) or keeps them whole on every rank.
Whole tensors come in two kinds, which differ only in the gradient. If the ranks divide the following work, each rank has a
part of the gradient, and the parts must be summed. If all ranks do the same work, each has the whole gradient. Below,
pieces are `[batch, seq / tp, ...]`.

The functional collectives are traced by torch.compile and seen by CommDebugMode.
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
    """Gather pieces of the sequence, for work that is split over the ranks. Backward reduce-scatters the gradient."""
    return _Paired.apply(x, mesh, _all_gather, _reduce_scatter)


def gather_for_all(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather pieces of the sequence, for work that every rank does in full.

    Backward keeps this rank's piece of the gradient.
    """
    return _Paired.apply(x, mesh, _all_gather, _own_piece)


def share(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the replicated `x`, for work that is split over the ranks. Backward all-reduces the gradient."""
    return _Paired.apply(x, mesh, _unchanged, sum_over)


def sum_to_pieces(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Reduce-scatter `[batch, seq, ...]` along the sequence. Backward gathers the gradient."""
    return _Paired.apply(x, mesh, _reduce_scatter, _all_gather)


def sum_to_all(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum over the ranks, on every rank."""
    return _Paired.apply(x, mesh, sum_over, _unchanged)


def own_piece(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's piece of a sequence that is equal on all ranks. Backward gathers the gradient."""
    return _Paired.apply(x, mesh, _own_piece, _all_gather)


def sum_over(x: Tensor, ranks: DeviceMesh | dist.ProcessGroup) -> Tensor:
    """All-reduce `x`. Has no gradient."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", ranks))


class _Paired(torch.autograd.Function):
    """Autograd function: the collective `there` in forward, and `back` in backward."""

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
