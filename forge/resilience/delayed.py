"""Device numbers read one step late, so that the host never waits for the step it has just launched."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor


class DelayedRead:
    """A queue of small device vectors on their way to the host.

    Step n's `push` starts a copy into pinned memory and returns at once; `pop` then gives step n - 1, whose
    copy is done by the time the device has begun step n. All ranks push and pop in the same order, so decisions on
    values that are equal on all ranks are taken by all at the same step.
    """

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._waiting: deque[tuple[Any, Tensor, torch.cuda.Event | None]] = deque()
        self._free: list[Tensor] = []

    def push(self, key: Any, vector: Tensor) -> None:
        """Take a snapshot of `vector` [n], any dtype, on the current stream; it may change afterwards."""
        vector = vector.detach()
        if not self._on_cuda:
            self._waiting.append((key, vector.clone(), None))
            return
        host = self._buffer_like(vector)
        host.copy_(vector, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((key, host, event))

    def pop(self, flush: bool = False) -> tuple[Any, list[float]] | None:
        """The oldest snapshot and its key; None if there is none, or only the newest and not `flush`."""
        if len(self._waiting) < (1 if flush else 2):
            return None
        key, host, event = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        values = host.tolist()
        if event is not None:
            self._free.append(host)
        return key, values

    def _buffer_like(self, vector: Tensor) -> Tensor:
        """A pinned buffer, used again where it fits: pinning memory is slow and waits for the device."""
        while self._free:
            buffer = self._free.pop()
            if buffer.shape == vector.shape and buffer.dtype == vector.dtype:
                return buffer
        return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
