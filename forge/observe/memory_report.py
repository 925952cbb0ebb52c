"""Where the memory of this rank goes, reported after the first step, and what to change when it runs out.

Walks shards and optimizer state, so it is the same for every engine and layout.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from forge.config import Config, Degrees
from forge.errors import FAILED, UserError
from forge.hook import Hook
from forge.observe.advice import advice
from forge.observe.hardware import GIB, most_resident
from forge.shard import Shard

log = logging.getLogger(__name__)

# PyTorch's message when the host's memory is full; there is no exception type for it.
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


class MemoryReport(Hook):
    """Reports after the first step what memory holds, in the log and as an event: `report_event(kind, **fields)`.

    Activations are what the first step took at its peak beyond parameters, gradients and optimizer state: on CUDA by
    the allocator's count, on the CPU by the growth of the process, which is rougher. So they include the logits
    and whatever a layout gathers or buffers.
    """

    def __init__(self, device: torch.device, report_event: Callable[..., None] = lambda *_, **__: None):
        self._device, self._on_card = device, device.type == "cuda"
        self._report_event = report_event
        self.bytes: dict[str, int] = {}
        self._step = 0
        self._resident_before = 0

    def count_state(self, held: Mapping[str, int], optimizer: Iterable[tuple[str, Shard, Tensor]]) -> None:
        """Count the state of this rank: `held` by the model in bytes by kind, and `optimizer` as (slot, shard, values)."""
        self.bytes |= {kind: size for kind, size in held.items() if size}
        # Offloaded state is elsewhere.
        here = (values for _, _, values in optimizer if values.device.type == self._device.type)
        self.bytes["optimizer"] = sum(values.nbytes for values in here)

    def per_parameter(self, parameters: int) -> str:
        """What is known so far in bytes of this rank for each of the model's `parameters`."""
        each = ", ".join(f"{kind} {size / parameters:.2f}" for kind, size in self.bytes.items())
        return f"{sum(self.bytes.values()) / parameters:.2f} bytes per parameter on this rank: {each}"

    def before_step(self, step: int) -> None:
        if not self._step and not self._on_card:
            self._resident_before = _resident()
        self._step = step

    def after_step(self, step: int) -> None:
        """Measure after the first step that this process makes."""
        if "activations" in self.bytes:
            return
        self.bytes["activations"] = max(0, self._beyond_state())
        log.info("%s", self.table())
        self._report_event("memory", **{f"{name}_bytes": size for name, size in self.bytes.items()})

    def table(self) -> str:
        """What is known so far, a line for each kind, in GiB."""
        rows = [
            f"  {name:<13}{size / GIB:10.3f} GiB{_NOTES.get(name, '')}" for name, size in self.bytes.items()
        ]
        where = "on its card" if self._on_card else "in its process"
        if "activations" in self.bytes:
            rows[-1] += f", by the {'allocator' if self._on_card else 'growth of the process'}"
        return "\n".join([f"memory of this rank {where}:", *(rows or ["  nothing is built yet"])])

    @contextmanager
    def explaining(self, config: Config, degrees: Degrees) -> Iterator[None]:
        """Turns running out of memory into a report, three keys to change, and a UserError with exit code 1."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            when = f"in step {self._step}" if self._step else "before the first step"
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            keys = advice(config, degrees, self._state_dominates(), self._on_card)
            log.error(
                "out of memory %s: %s\n%s\nThe card or host holds no more. Change one of:\n  %s",
                when,
                first_line,
                self.table(),
                "\n  ".join(keys),
            )
            raise UserError(
                f"out of memory {when}; what takes it and three keys to change are above", exit_code=FAILED
            ) from error

    def _state_dominates(self) -> bool:
        """True if parameters, gradients and optimizer take most of the memory, as far as that is known."""
        if not self._step:
            return True
        if self._on_card:
            return 2 * self._state() > torch.cuda.get_device_properties(self._device).total_memory
        return "activations" in self.bytes and self._state() > self.bytes["activations"]

    def _state(self) -> int:
        return sum(size for kind, size in self.bytes.items() if kind != "activations")

    def _beyond_state(self) -> int:
        """What the peak holds besides state; the process held its parameters before it began to grow."""
        if self._on_card:
            return torch.cuda.max_memory_allocated(self._device) - self._state()
        grown = most_resident() - self._resident_before
        return grown - self.bytes.get("gradients", 0) - self.bytes.get("buckets", 0)


_NOTES = {
    "gradients": "  while a step runs",
    "buckets": "  of gradients on their way, during backward",
    "activations": "  and buffers, at the peak of the first step",
}


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is the device's or the host's way to say that there is no more memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in str(error)


def _resident() -> int:
    """Bytes of this process in memory now; where /proc is missing, the most so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return most_resident()
