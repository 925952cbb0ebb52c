"""Memory table of this rank, logged after its first step.

Bytes are counted from shards and optimizer state, so the table is correct for every engine and layout.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from forge.hook import Hook
from forge.observe.hardware import GIB, most_resident
from forge.shard import Shard

log = logging.getLogger(__name__)

_NOTES = {
    "gradients": "  while a step runs",
    "buckets": "  of gradients in communication, during backward",
    "activations": "  and buffers, at the peak of the first step",
}


class MemoryReport(Hook):
    """Logs the memory table after the first step. `report_event(kind, **fields)` writes the same numbers as an event.

    Activations are the peak memory of the first step minus parameters, gradients and optimizer state. On CUDA the
    allocator's counters measure the peak. On the CPU the growth of the process measures it less exactly. Activations
    include logits and communication buffers.
    """

    def __init__(self, device: torch.device, report_event: Callable[..., None] = lambda *_, **__: None):
        self.device, self._on_gpu = device, device.type == "cuda"
        self._report_event = report_event
        self.bytes: dict[str, int] = {}
        self.step = 0
        self._resident_before = 0

    def count_state(
        self, of_model: Mapping[str, int], optimizer: Iterable[tuple[str, Shard, Tensor]]
    ) -> None:
        """Count the bytes of this rank's state.

        of_model: kind -> bytes of the model. optimizer: the optimizer's tensors, as (slot, shard, values).
        """
        self.bytes |= {kind: size for kind, size in of_model.items() if size}
        # Offloaded state is not in device memory.
        here = (values for _, _, values in optimizer if values.device.type == self.device.type)
        self.bytes["optimizer"] = sum(values.nbytes for values in here)

    def per_parameter(self, parameters: int) -> str:
        """Return a log line with this rank's bytes per parameter. parameters: number of parameters of the whole model."""
        each = ", ".join(f"{kind} {size / parameters:.2f}" for kind, size in self.bytes.items())
        return f"{sum(self.bytes.values()) / parameters:.2f} bytes per parameter on this rank: {each}"

    def before_step(self, step: int) -> None:
        if not self.step and not self._on_gpu:
            self._resident_before = _resident()
        self.step = step

    def after_step(self, step: int) -> None:
        """After the first step of this process, measure activations and log the table."""
        if "activations" in self.bytes:
            return
        if self._on_gpu:
            activations = torch.cuda.max_memory_allocated(self.device) - self._state()
        else:
            # Parameters were already resident before the step.
            grown = most_resident() - self._resident_before
            activations = grown - self.bytes.get("gradients", 0) - self.bytes.get("buckets", 0)
        self.bytes["activations"] = max(0, activations)
        log.info("%s", self.table())
        self._report_event("memory", **{f"{name}_bytes": size for name, size in self.bytes.items()})

    def table(self) -> str:
        """Return the current memory table: a line for each kind of memory, in GiB."""
        rows = [
            f"  {name:<13}{size / GIB:10.3f} GiB{_NOTES.get(name, '')}" for name, size in self.bytes.items()
        ]
        where = "on its GPU" if self._on_gpu else "in its process"
        if "activations" in self.bytes:
            rows[-1] += f", measured by the {'allocator' if self._on_gpu else 'growth of the process'}"
        return "\n".join([f"memory of this rank {where}:", *(rows or ["  nothing is built yet"])])

    def state_dominates(self) -> bool:
        """Return whether parameters, gradients and optimizer state use most of the memory; True before the first step."""
        if not self.step:
            return True
        if self._on_gpu:
            return 2 * self._state() > torch.cuda.get_device_properties(self.device).total_memory
        return "activations" in self.bytes and self._state() > self.bytes["activations"]

    def _state(self) -> int:
        return sum(size for kind, size in self.bytes.items() if kind != "activations")


def _resident() -> int:
    """Return the resident memory of this process in bytes. Without /proc, return its peak."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return most_resident()
