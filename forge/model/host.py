"""Read numbers from the device inside a layer.

Each read waits for the device. Activation checkpointing runs a forward again in backward. That second run reuses the
numbers of the first run and does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor


class HostReads:
    """The numbers that one checkpointed forward reads, in order."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._next = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Record the reads of the body, which is a forward. When the same forward runs again, return the recorded numbers."""
        self._next = 0
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def read(self, x: Tensor) -> Any:
        """Return the next recorded number. In the first run, record and return `x.tolist()`."""
        if self._next == len(self._values):
            self._values.append(x.tolist())
        self._next += 1
        return self._values[self._next - 1]


# Autograd recomputes in threads of its own; each thread has a value of its own.
_current: ContextVar[HostReads | None] = ContextVar("host_reads", default=None)


def read(x: Tensor) -> Any:
    """Return `x.tolist()`. Waits for the device, except in recomputation."""
    reads = _current.get()
    return x.tolist() if reads is None else reads.read(x)
