"""Read numbers from the device inside a layer.

Each read synchronises with the device. Activation checkpointing runs a forward again in backward; the second run reuses
the numbers read by the first run and does not synchronise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor


class HostReads:
    """The numbers read by one checkpointed forward, in order."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._next = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Return a context manager for one run of a forward.

        In the first run, reads record their numbers. In a later run (recomputation), reads return the recorded numbers.
        """
        self._next = 0
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def read(self, *tensors: Tensor) -> list[Any]:
        """Return `lists_of(tensors)`. Forward records the value.

        Recomputation returns the recorded value without a synchronisation.
        """
        if self._next == len(self._values):
            self._values.append(lists_of(tensors))
        self._next += 1
        return self._values[self._next - 1]


# Autograd recomputes in its own threads, and each thread has its own value of the variable.
_current: ContextVar[HostReads | None] = ContextVar("host_reads", default=None)


def read(*tensors: Tensor) -> list[Any]:
    """Return `x.tolist()` of each of `tensors`. Synchronises with the device once, except in recomputation."""
    reads = _current.get()
    return lists_of(tensors) if reads is None else reads.read(*tensors)


def lists_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Return `x.tolist()` of each of `tensors`, with one synchronisation for all."""
    # On CUDA, a copy that does not wait goes to pinned memory.
    copies = [x.to("cpu", non_blocking=True) for x in tensors]
    if tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return [copy.tolist() for copy in copies]
