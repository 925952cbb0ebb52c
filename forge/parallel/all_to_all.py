"""All-to-alls that overlap with computation.

`AsyncAllToAll.start` returns before the rows have arrived, and `finish` waits for them. Operators between the two run during
the all-to-all. Backward mirrors this: the gradient's all-to-all starts in the backward of `finish`, and the backward of
`start` waits for it. Autograd runs backward in the reverse order of forward. So if the operators of other rows lie between
`start` and `finish`, their backward overlaps the gradient's all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.runtime import compat

Arrival: TypeAlias = Callable[[], Tensor]
"""Waits for the rows of an all-to-all and returns them."""
Send: TypeAlias = Callable[[Tensor, dist.ProcessGroup, list[int], list[int]], Arrival]
"""(rows, group, rows to receive from each rank, rows to send to each rank) -> Arrival. Collective. Not differentiable."""


class AsyncAllToAll:
    """One all-to-all of rows `[sum(sends), dim]` over `group`. Call `start` and `finish` once each.

    sends, receives: number of rows to and from each rank. send, send_gradients: start the transfer in forward and in
    backward.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        receives: list[int],
        sends: list[int],
        send: Send = compat.start_all_to_all,
        send_gradients: Send = compat.start_all_to_all,
    ):
        self.group, self.receives, self.sends = group, receives, sends
        self.send, self.send_gradients = send, send_gradients
        self.arrival: Arrival | None = None  # of the all-to-all in flight
        # Connects `start` and `finish` in the graph of autograd. It has the shape of the received rows, and no values.
        self._placeholder: Tensor | None = None

    def start(self, rows: Tensor) -> None:
        """Send `rows`. Collective."""
        self._placeholder = _Start.apply(rows, self)

    def finish(self) -> Tensor:
        """Wait for the received rows and return them, `[sum(receives), dim]`, in the order of ranks."""
        placeholder, self._placeholder = self._placeholder, None
        return _Finish.apply(placeholder, self)

    def take(self) -> Tensor:
        """Wait for the all-to-all in flight, and return its rows."""
        arrival, self.arrival = self.arrival, None
        assert arrival is not None
        return arrival()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, call: AsyncAllToAll) -> Tensor:
        ctx.call = call
        call.arrival = call.send(rows, call.group, call.receives, call.sends)
        return _placeholder(rows, sum(call.receives))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.call.take(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _placeholder: Tensor, call: AsyncAllToAll) -> Tensor:
        ctx.call = call
        return call.take()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        call = ctx.call
        call.arrival = call.send_gradients(grad, call.group, call.sends, call.receives)
        return _placeholder(grad, grad.shape[0]), None


def _placeholder(rows: Tensor, number: int) -> Tensor:
    """Return an uninitialised tensor `[number, *rows.shape[1:]]` that takes the memory of one element."""
    return rows.new_empty(()).expand(number, *rows.shape[1:])
