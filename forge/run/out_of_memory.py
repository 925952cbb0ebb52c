"""Explain an out-of-memory error: memory by kind, keys to change, and the planned peak memory with each change.

The planner runs in separate processes, because this process has no memory left.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import Any, TypeAlias

import torch

from forge.config import Config, Degrees, Phases, check_world, to_toml
from forge.config.checks import check
from forge.config.keys import to_literal
from forge.observe.hardware import GIB
from forge.observe.memory_report import MemoryReport
from forge.runtime.causes import Cause
from forge.runtime.distributed import RanksFailed, ran_out_of_memory
from forge.runtime.errors import FAILED, UserError
from forge.runtime.tools import PEAK_PLANNER

log = logging.getLogger(__name__)

# Well below the time limit of a step, because the other ranks are waiting in the step.
PLANNING_S = 60.0

Change: TypeAlias = tuple[str, Any, str]
"""(key, value, effect). A doubled parallel.dp_shard needs twice as many processes."""
Once: TypeAlias = Callable[[Callable[[], None], float], None]
"""`once(work, patience_s)` calls `work` on the first rank that calls `once`. Other ranks wait until `work` has ended, at
most `patience_s` seconds."""
_SAME_CURVE = "; the curve stays the same"


@contextmanager
def explaining_exhaustion(
    report: MemoryReport, config: Config, degrees: Degrees, once: Once
) -> Iterator[None]:
    """Turn an out-of-memory error of the body into UserError (exit 1).

    First log the memory table, up to three keys to change, and their planned peaks.
    """
    try:
        yield
    except (RuntimeError, MemoryError, RanksFailed) as error:
        if not ran_out_of_memory(error):
            raise
        when = f"in step {report.step}" if report.step else "before the first step"
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        on_gpu = report.device.type == "cuda"
        usable = usable_changes(config, degrees, report.state_dominates(), on_gpu, report.step)
        changes = list(islice(usable, 3))
        lines = [f"{_assignment(change)}  # {change[2]}" for change, _ in changes]
        log.error(
            "out of memory %s: %s\n%s\nThe GPU or host is full. Change one of:\n  %s\n"
            "or add --plan --world-size %d --hardware NAME to the command line to see what fits, and --search "
            "to look for a layout",
            *(when, first_line, report.table(), "\n  ".join(lines), degrees.world),
            extra=Cause.OUT_OF_MEMORY.mark,
        )
        bounds = (config.resilience.first_step_timeout_s, config.resilience.step_timeout_s)
        patience = min([PLANNING_S, *(seconds / 2 for seconds in bounds if seconds)])
        # An error here must not hide the original one.
        with suppress(Exception):
            once(lambda: _log_plans(config, degrees, changes, report.device, patience), patience)
        message = f"out of memory {when}; see the memory table and the keys to change above"
        raise UserError(message, FAILED, Cause.OUT_OF_MEMORY) from error


def _log_plans(
    config: Config,
    degrees: Degrees,
    changes: list[tuple[Change, Config]],
    device: torch.device,
    patience_s: float,
) -> None:
    """Log the planned peak memory of the run, and of the run with each of `changes`.

    Plans that are not ready after `patience_s` seconds are left out.
    """
    log.info("planning the peak memory with each of these changes, for at most %.0f s", patience_s)
    configs = [(config, degrees.world)]
    configs += [(changed, _world(change, degrees)) for change, changed in changes]
    # Of the size of a node, the plan uses only the number of nodes that an expert group spans.
    now, *then = planned_peaks(configs, degrees.ep // degrees.ep_nodes, device, patience_s)
    lines = [
        f"{_assignment(change)}: {peak / GIB:.4g} GiB"
        for (change, _), peak in zip(changes, then, strict=True)
        if peak is not None
    ]
    if now is None or not lines:
        log.info("the planner gave no result: it ran out of time, or does not support this model")
        return
    has = ""
    if device.type == "cuda":
        has = f" (its GPU has {torch.cuda.get_device_properties(device).total_memory / GIB:.4g} GiB)"
    log.error(
        "planned peak memory: %.4g GiB of tensors on the fullest rank%s. With one change:\n  %s",
        *(now / GIB, has, "\n  ".join(lines)),
        extra=Cause.OUT_OF_MEMORY.mark,
    )


def planned_peaks(
    configs: list[tuple[Config, int]], per_node: int, device: torch.device, patience_s: float
) -> list[int | None]:
    """Plan all configurations at the same time. Return the peak memory of each in bytes.

    configs: (configuration, world size) pairs. per_node: ranks of a node. A result is None if planning failed or took
    longer than `patience_s` seconds.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    kind = "card" if device.type == "cuda" else "host"
    children = [
        subprocess.Popen(
            [sys.executable, "-m", PEAK_PLANNER, str(world), str(per_node), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        for _, world in configs
    ]
    for child, (config, _) in zip(children, configs, strict=True):
        assert child.stdin is not None
        child.stdin.write(to_toml(config))
        child.stdin.close()
    end = time.monotonic() + patience_s
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, end - time.monotonic()))
        child.kill()
    return [_number(child) for child in children]


def _number(child: subprocess.Popen[str]) -> int | None:
    assert child.stdout is not None
    with child.stdout as output:
        return int(output.read()) if child.wait() == 0 else None


def _world(change: Change, degrees: Degrees) -> int:
    """Return the world size after `change`."""
    return degrees.world * (2 if change[0] == "parallel.dp_shard" else 1)


def _assignment(change: Change) -> str:
    key, value, _ = change
    return f"{key} = {to_literal(value)}"


def usable_changes(
    config: Config, degrees: Degrees, state_dominates: bool, on_gpu: bool, step: int = 0
) -> Iterator[tuple[Change, Config]]:
    """Yield valid changes that reduce memory, the best first, each with the changed configuration.

    state_dominates: True if parameters, gradients and optimizer state use more memory than activations. on_gpu: True if GPU
    memory is exhausted; moving state to the host then helps. A change of parallel.dp_shard assumes twice as many processes.
    step: the failed step; 0: before the first. If its phase overrides a key of [train], the change is to the phase's key.
    """
    phases = Phases(config)
    index = phases.index_at(phases.tokens_after(max(0, step - 1)))
    on_state, on_activations = _on_state(config, degrees), _on_activations(config, index)
    first, second = (on_state, on_activations) if state_dominates else (on_activations, on_state)
    for change in chain(first, second, _on_host(config, on_gpu)):
        changed = _accepted(config, degrees, change, index)
        if changed is not None:
            yield change, changed


def _step_size(config: Config, index: int | None, name: str) -> tuple[str, int]:
    """Return the key that sets the step size `name` in phase `index` (None: no phase), and its value."""
    of_phase = None if index is None else getattr(config.phase[index], name)
    if of_phase is not None:
        return f"phase[{index}].{name}", of_phase
    return f"train.{name}", getattr(config.train, name)


def _on_activations(config: Config, index: int | None) -> Iterator[Change]:
    train = config.train
    key, micro = _step_size(config, index, "micro_batch_size")
    if micro > 1:
        # The largest proper divisor divides the global batch exactly.
        smaller = max(size for size in range(1, micro) if micro % size == 0)
        yield key, smaller, "fewer activations at once" + _SAME_CURVE
    if config.activation_checkpoint.mode != "full":
        yield "activation_checkpoint.mode", "full", "recompute activations in backward" + _SAME_CURVE
    if train.loss_chunk_tokens > 128:
        yield "train.loss_chunk_tokens", train.loss_chunk_tokens // 4, "fewer logits at once" + _SAME_CURVE
    key, seq_len = _step_size(config, index, "seq_len")
    if seq_len > 1:
        yield key, seq_len // 2, "shorter sequences; the samples and the curve change"


def _on_state(config: Config, degrees: Degrees) -> Iterator[Change]:
    if config.parallel.data_parallel != "fsdp2":
        effect = "shard parameters, gradients and optimizer" + _SAME_CURVE
        yield "parallel.data_parallel", "fsdp2", effect
    if degrees.dp_replicate > 1:
        yield (
            "parallel.dp_replicate",
            1,
            "also set parallel.dp_shard = -1, to shard over all ranks" + _SAME_CURVE,
        )
    effect = f"half the state per rank, on {2 * degrees.world} processes" + _SAME_CURVE
    yield "parallel.dp_shard", 2 * degrees.dp_shard, effect
    if ":" not in config.optimizer.name and config.optimizer.moment_dtype == "float32":
        yield "optimizer.moment_dtype", "bfloat16", "at most half the optimizer state, but less exact"
    if config.precision.storage == "float64":
        yield "precision.storage", "float32", "half the state"


def _on_host(config: Config, on_gpu: bool) -> Iterator[Change]:
    """Yield the changes of last resort: first activations in host memory, then parameters and optimizer state in host memory.

    Every microbatch then moves activations or weights over the PCIe bus. With the parameters in host memory, the
    optimizer runs on the CPU.
    """
    if on_gpu and config.activation_checkpoint.mode in ("none", "selective"):
        yield "activation_checkpoint.mode", "offload", "activations in host memory" + _SAME_CURVE
    if on_gpu and not config.parallel.cpu_offload:
        yield (
            "parallel.cpu_offload",
            True,
            "parameters and optimizer state in host memory, which is slow" + _SAME_CURVE,
        )


def _accepted(config: Config, degrees: Degrees, change: Change, index: int | None) -> Config | None:
    """Return the configuration with `change`; None if it is invalid or does not fit the world size.

    index: the phase that `change` may change.
    """
    key, value, _ = change
    section, _, name = key.partition(".")
    changes = {name: value} | ({"dp_shard": -1} if name == "dp_replicate" else {})
    if index is not None and section == f"phase[{index}]":
        phase = config.phase[index].model_copy(update=changes)
        phases = (*config.phase[:index], phase, *config.phase[index + 1 :])
        changed = config.model_copy(update={"phase": phases})
    else:
        changed = config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})
    try:
        check_world(changed, _world(change, degrees))
    except UserError:
        return None
    return None if check(changed) else changed
