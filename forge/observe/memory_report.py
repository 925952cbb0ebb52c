"""A table of what the memory of this rank holds, logged after the first step, and keys to change when it is exhausted.

It is counted from shards and optimizer state, so it is the same for every engine and layout.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from forge.config import Config, Degrees, check_world
from forge.config.checks import check
from forge.config.toml import to_literal
from forge.errors import FAILED, UserError
from forge.hook import Hook
from forge.observe.hardware import GIB, most_resident
from forge.shard import Shard

log = logging.getLogger(__name__)

# The message of PyTorch when the host is out of memory; it has no exception class of its own.
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
_NOTES = {
    "gradients": "  while a step runs",
    "buckets": "  of gradients in communication, during backward",
    "activations": "  and buffers, at the peak of the first step",
}


class MemoryReport(Hook):
    """Logs the table after the first step, and reports its bytes as an event: `report_event(kind, **fields)`.

    Activations are the peak of the first step without parameters, gradients and optimizer state: on CUDA as counted by the
    allocator, on the CPU by the growth of the process, which is less exact. They include logits and communication buffers.
    """

    def __init__(self, device: torch.device, report_event: Callable[..., None] = lambda *_, **__: None):
        self._device, self._on_card = device, device.type == "cuda"
        self._report_event = report_event
        self.bytes: dict[str, int] = {}
        self._step = 0
        self._resident_before = 0

    def count_state(
        self, of_model: Mapping[str, int], optimizer: Iterable[tuple[str, Shard, Tensor]]
    ) -> None:
        """Count the state of this rank: the model's bytes by kind, and the optimizer's tensors as (slot, shard, values)."""
        self.bytes |= {kind: size for kind, size in of_model.items() if size}
        # Offloaded state is not in the memory of the device.
        here = (values for _, _, values in optimizer if values.device.type == self._device.type)
        self.bytes["optimizer"] = sum(values.nbytes for values in here)

    def per_parameter(self, parameters: int) -> str:
        """Return the bytes of this rank for each of the model's `parameters`, as a line of the log."""
        each = ", ".join(f"{kind} {size / parameters:.2f}" for kind, size in self.bytes.items())
        return f"{sum(self.bytes.values()) / parameters:.2f} bytes per parameter on this rank: {each}"

    def before_step(self, step: int) -> None:
        if not self._step and not self._on_card:
            self._resident_before = _resident()
        self._step = step

    def after_step(self, step: int) -> None:
        """Measure after the first step of this process."""
        if "activations" in self.bytes:
            return
        if self._on_card:
            activations = torch.cuda.max_memory_allocated(self._device) - self._state()
        else:
            # The process held its parameters before it began to grow.
            grown = most_resident() - self._resident_before
            activations = grown - self.bytes.get("gradients", 0) - self.bytes.get("buckets", 0)
        self.bytes["activations"] = max(0, activations)
        log.info("%s", self.table())
        self._report_event("memory", **{f"{name}_bytes": size for name, size in self.bytes.items()})

    def table(self) -> str:
        """Return what has been counted so far: a line for each kind, in GiB."""
        rows = [
            f"  {name:<13}{size / GIB:10.3f} GiB{_NOTES.get(name, '')}" for name, size in self.bytes.items()
        ]
        where = "on its card" if self._on_card else "in its process"
        if "activations" in self.bytes:
            rows[-1] += f", by the {'allocator' if self._on_card else 'growth of the process'}"
        return "\n".join([f"memory of this rank {where}:", *(rows or ["  nothing is built yet"])])

    @contextmanager
    def explaining(self, config: Config, degrees: Degrees) -> Iterator[None]:
        """Turn an out-of-memory error of the body into the table, three keys to change, and UserError (exit 1)."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            when = f"in step {self._step}" if self._step else "before the first step"
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            keys = advice(config, degrees, self._state_dominates(), self._on_card)
            log.error(
                "out of memory %s: %s\n%s\nThe card or host holds no more. Change one of:\n  %s\n"
                "or add --plan --world-size %d --hardware NAME to the command line: it says what fits, and with --search "
                "looks for a layout",
                *(when, first_line, self.table(), "\n  ".join(keys), degrees.world),
            )
            raise UserError(
                f"out of memory {when}; what takes it and three keys to change are above", exit_code=FAILED
            ) from error

    def _state_dominates(self) -> bool:
        """Whether parameters, gradients and optimizer take most of the memory, as far as that is known."""
        if not self._step:
            return True
        if self._on_card:
            return 2 * self._state() > torch.cuda.get_device_properties(self._device).total_memory
        return "activations" in self.bytes and self._state() > self.bytes["activations"]

    def _state(self) -> int:
        return sum(size for kind, size in self.bytes.items() if kind != "activations")


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is an out-of-memory error of the device or the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in str(error)


def _resident() -> int:
    """Return the resident bytes of this process; without /proc, their peak."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return most_resident()


Change: TypeAlias = tuple[str, Any, str]
"""(key, value, effect); to double parallel.dp_shard takes twice as many processes."""
_SAME_CURVE = "; the curve stays the same"


def advice(config: Config, degrees: Degrees, state_dominates: bool, on_card: bool) -> list[str]:
    """Return three lines `key = value  # effect` that reduce memory and that forge accepts, the best first.

    `state_dominates`: parameters, gradients and optimizer state take the memory, not activations. `on_card`: the memory of
    a card is exhausted, and state could move to the host.
    """
    usable = usable_changes(config, degrees, state_dominates, on_card)
    return [f"{key} = {to_literal(value)}  # {effect}" for (key, value, effect), _ in islice(usable, 3)]


def usable_changes(
    config: Config, degrees: Degrees, state_dominates: bool, on_card: bool
) -> Iterator[tuple[Change, Config]]:
    """Yield changes that reduce memory and that forge accepts, the best first, each with the changed configuration.

    Arguments as for `advice`. A change of parallel.dp_shard is for twice as many processes.
    """
    on_state, on_activations = _on_state(config, degrees, on_card), _on_activations(config)
    for change in chain(on_state, on_activations) if state_dominates else chain(on_activations, on_state):
        changed = _accepted(config, degrees, change)
        if changed is not None:
            yield change, changed


def _on_activations(config: Config) -> Iterator[Change]:
    train = config.train
    micro = train.micro_batch_size
    if micro > 1:
        # The largest proper divisor keeps the division of the global batch exact.
        smaller = max(size for size in range(1, micro) if micro % size == 0)
        yield "train.micro_batch_size", smaller, "fewer activations at once" + _SAME_CURVE
    if config.activation_checkpoint.mode != "full":
        yield "activation_checkpoint.mode", "full", "recompute activations in backward" + _SAME_CURVE
    if train.loss_chunk_tokens > 128:
        yield "train.loss_chunk_tokens", train.loss_chunk_tokens // 4, "fewer logits at once" + _SAME_CURVE
    if train.seq_len > 1:
        yield "train.seq_len", train.seq_len // 2, "shorter sequences: another run, on other samples"


def _on_state(config: Config, degrees: Degrees, on_card: bool) -> Iterator[Change]:
    if config.parallel.data_parallel != "fsdp2":
        effect = "shard parameters, gradients and optimizer" + _SAME_CURVE
        yield "parallel.data_parallel", "fsdp2", effect
    if degrees.dp_replicate > 1:
        yield (
            "parallel.dp_replicate",
            1,
            "with parallel.dp_shard = -1: shard over all ranks" + _SAME_CURVE,
        )
    effect = f"half the state per rank, on {2 * degrees.world} processes" + _SAME_CURVE
    yield "parallel.dp_shard", 2 * degrees.dp_shard, effect
    if on_card and not config.parallel.cpu_offload:
        yield "parallel.cpu_offload", True, "state in host memory, slow" + _SAME_CURVE
    if ":" not in config.optimizer.name and config.optimizer.moment_dtype == "float32":
        yield "optimizer.moment_dtype", "bfloat16", "half the optimizer state or less, less exact"
    if config.precision.storage == "float64":
        yield "precision.storage", "float32", "half the state"


def _accepted(config: Config, degrees: Degrees, change: Change) -> Config | None:
    """Return the configuration with this change; None if it is not valid or does not fit the processes."""
    key, value, _ = change
    section, _, name = key.partition(".")
    changes = {name: value} | ({"dp_shard": -1} if name == "dp_replicate" else {})
    changed = config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})
    try:
        check_world(changed, degrees.world * (2 if name == "dp_shard" else 1))
    except UserError:
        return None
    return None if check(changed) else changed
