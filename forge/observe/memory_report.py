"""Where the memory of this rank goes, told after the first step, and what to change when it runs out.

Walks shards and optimizer state, so it is the same for every engine and layout.
"""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from forge.config import Config, Degrees
from forge.errors import FAILED, UserError
from forge.observe.advice import advice
from forge.observe.hardware import GIB
from forge.shard import Shard

log = logging.getLogger(__name__)

# What PyTorch says when the host has no more; there is no type for it.
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


class MemoryReport:
    """Watcher of steps that tells after the first one what memory holds; `tell` gets its bytes as an event.

    Activations are what the first step took at its peak beyond parameters, gradients and optimizer state: on CUDA by
    the allocator's count, on the CPU by the growth of the process, which is rougher. So they include the logits
    and whatever a layout gathers or buffers.
    """

    def __init__(self, device: torch.device, tell: Callable[..., None] | None = None):
        self._device, self._tell = device, tell
        self.bytes: dict[str, int] = {}
        self._step = 0
        self._resident_before = 0

    def take_in(self, held: Mapping[str, int], optimizer: Iterable[tuple[str, Shard, Tensor]]) -> None:
        """Count the state of this rank: `held` by the model in bytes by kind, and `optimizer` as (slot, shard, values)."""
        self.bytes |= {kind: size for kind, size in held.items() if size}
        self.bytes["optimizer"] = sum(self._size(values) for _, _, values in optimizer)

    def per_parameter(self, parameters: int) -> str:
        """What is known so far in bytes of this rank for each of the model's `parameters`."""
        each = ", ".join(f"{kind} {size / parameters:.2f}" for kind, size in self.bytes.items())
        return f"{sum(self.bytes.values()) / parameters:.2f} bytes per parameter on this rank: {each}"

    def before_step(self, step: int) -> None:
        if not self._step and self._device.type != "cuda":
            self._resident_before = _resident()
        self._step = step

    def after_step(self, step: int) -> None:
        """After the first step that this process makes: measure, log the table, and tell."""
        if "activations" in self.bytes:
            return
        self.bytes["activations"] = max(0, self._peak() - self._state_at_peak())
        log.info("%s", self.table())
        if self._tell is not None:
            self._tell("memory", **{f"{name}_bytes": size for name, size in self.bytes.items()})

    def table(self) -> str:
        """What is known so far, a line for each kind, in GiB."""
        rows = [
            f"  {name:<13}{size / GIB:10.3f} GiB{_NOTES.get(name, '')}" for name, size in self.bytes.items()
        ]
        where = "on its card" if self._device.type == "cuda" else "in its process"
        if "activations" in self.bytes:
            source = "allocator" if self._device.type == "cuda" else "growth of the process"
            rows[-1] += f", by the {source}"
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
            on_card = self._device.type == "cuda"
            keys = "\n".join(
                f"  {line}" for line in advice(config, degrees, self._state_dominates(), on_card)
            )
            log.error(
                "out of memory %s: %s\n%s\nThe card or host holds no more. Change one of:\n%s",
                when,
                first_line,
                self.table(),
                keys,
            )
            raise UserError(
                f"out of memory {when}; what takes it and three keys to change are above", exit_code=FAILED
            ) from error

    def _size(self, tensor: Tensor) -> int:
        """Bytes on the device that is reported on: offloaded state is elsewhere."""
        return tensor.numel() * tensor.element_size() if tensor.device.type == self._device.type else 0

    def _state_dominates(self) -> bool:
        """True if parameters, gradients and optimizer take most of the memory, as far as that is known."""
        if not self._step:
            return True
        state = sum(size for name, size in self.bytes.items() if name != "activations")
        if self._device.type == "cuda":
            return 2 * state > torch.cuda.get_device_properties(self._device).total_memory
        return "activations" in self.bytes and state > self.bytes["activations"]

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        # The unit of ru_maxrss is KiB, on macOS bytes.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return peak - self._resident_before

    def _state_at_peak(self) -> int:
        """What the peak counts besides activations; the process held its parameters before it began to grow."""
        if self._device.type == "cuda":
            return sum(size for kind, size in self.bytes.items() if kind != "activations")
        return self.bytes.get("gradients", 0) + self.bytes.get("buckets", 0)


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
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * resource.getpagesize()
