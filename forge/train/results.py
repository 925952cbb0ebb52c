"""Step results. They are copied from device to host without a synchronisation, and read one step late."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forge.hook import StepInfo, StepResult
from forge.parallel.step.gradients import GradientReport
from forge.parallel.step.model import Sums
from forge.parallel.step.routers import RouterReport


class StepResults:
    """A queue with the result of at most one step.

    All ranks push and pop equal numbers in the same order, so they make equal decisions. A result includes the router
    report if `with_routers(step)` is true.
    """

    def __init__(self, device: torch.device, with_routers: Callable[[int], bool]):
        self.stop_requested = False
        """True once a popped result contains any rank's request to end the run."""
        self.save_requested = False
        """True if a result popped since the last `clear_save_request` contains any rank's request for a checkpoint."""
        self._device, self._with_routers = device, with_routers
        self._delayed = DelayedRead(device)

    def push(self, info: StepInfo, sums: Sums, report: GradientReport, routers: RouterReport | None) -> None:
        """Start copying the numbers of the launched step to the host. Returns at once."""
        parts = [sums.values, torch.stack([report.norm, report.skip.double(), report.stop, report.save])]
        layers: tuple[int, ...] = ()
        if routers is not None and self._with_routers(info.step):
            parts.append(routers.values.flatten())
            layers = routers.layers
        self._delayed.push((info, layers), torch.cat(parts))

    def pop(self) -> StepResult | None:
        """Wait for the device and return the result of the last pushed step; None if it was popped before.

        The next step may already have been launched, but not its update. The model is then still in the state after the
        returned step.
        """
        began = time.perf_counter()
        ready = self._delayed.pop(flush=True)
        if ready is None:
            return None
        (info, layers), values = ready
        objective, cross_entropy, z_loss, tokens, norm, skipped, stop, save = values[:8]
        self.stop_requested |= stop > 0
        self.save_requested |= save > 0
        return StepResult(
            **vars(info),
            loss=cross_entropy / max(tokens, 1.0),
            z_loss=z_loss / max(tokens, 1.0),
            objective=objective / max(tokens, 1.0),
            grad_norm=norm,
            valid_tokens=tokens,
            skipped=skipped > 0,
            waited_s=time.perf_counter() - began,
            router_layers=layers,
            routers=values[8:],
        )

    def clear_save_request(self) -> None:
        """Forget all requests for a save so far. Call when a checkpoint is saved."""
        self.save_requested = False

    def clear(self) -> None:
        """Discard the pushed result, if it was not popped."""
        self._delayed = DelayedRead(self._device)


class DelayedRead:
    """A queue of small device vectors that are being copied to the host. For hooks too (docs/internals/extending/hook.md).

    `push` of step n starts a copy into pinned memory and returns at once. `pop` then returns step n - 1, whose copy is
    complete once the device has begun step n. All ranks push and pop in the same order, so they decide on equal values
    at the same step.
    """

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._waiting: deque[tuple[Any, Tensor, torch.cuda.Event | None]] = deque()
        self._free: list[Tensor] = []

    def push(self, key: Any, vector: Tensor) -> None:
        """Copy `vector` `[n]`, any dtype, on the current stream. `vector` may change afterwards."""
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
        """Return (key, values) of the oldest copy, waiting for the device if necessary.

        None if there is no copy, or if only the newest is left and `flush` is false.
        """
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
        """Return a pinned buffer like `vector`; reuse one if possible, because pinning synchronises with the device."""
        while self._free:
            buffer = self._free.pop()
            if buffer.shape == vector.shape and buffer.dtype == vector.dtype:
                return buffer
        return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
