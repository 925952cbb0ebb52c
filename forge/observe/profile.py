"""torch.profiler traces of selected steps on selected ranks, and CUDA memory snapshots of these steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from forge.config.schema import Profile
from forge.hook import Hook
from forge.runtime.causes import Cause

log = logging.getLogger(__name__)

# Maximum number of allocations and frees in a memory snapshot: a few steps of a large model, tens of megabytes.
SNAPSHOT_ENTRIES = 200_000


def report_missing_profiles(config: Profile, world: int, done: int, steps: int) -> None:
    """Log the ranks and steps of `config` that the run does not have, because no trace of them is written.

    world: the world size. done: number of steps made before this start. steps: `train.steps`. Not an error: after a
    restart, a run may have fewer ranks or be past the span.
    """
    if not config.span:
        return
    span, (first, last) = list(config.span), config.span
    if absent := [rank for rank in config.ranks if rank >= world]:
        message = "profile.ranks: the run has no rank %s, so no profile of it is written; use ranks 0 to %d"
        log.warning(message, ", ".join(map(str, absent)), world - 1, extra=Cause.NOTE.mark)
    if first > steps:
        message = (
            "profile.span = %s: no profile is written, because the run ends at step %d; choose earlier steps"
        )
        log.warning(message, span, steps, extra=Cause.NOTE.mark)
    elif last <= done:
        log.info(
            "profile.span = %s: no profile is written unless the run rolls back, because it resumes after step %d",
            *(span, done),
        )


class StepProfiler(Hook):
    """Writes profiles to `folder` after the last selected step, or at the end of the run.

    `rank-R-steps-A-B.json.gz` opens in https://ui.perfetto.dev and chrome://tracing. With `memory_snapshot`,
    `rank-R-steps-A-B.pickle` opens in https://pytorch.org/memory_viz. A failed write causes only a warning.
    """

    def __init__(self, config: Profile, rank: int, folder: Path, device: torch.device):
        self._first, self._last = config.span or (0, 0)
        self._chosen = bool(config.span) and rank in config.ranks
        self._snapshot = config.memory_snapshot and device.type == "cuda"
        if self._chosen and config.memory_snapshot and not self._snapshot:
            message = "profile.memory_snapshot: no snapshot is made, because only CUDA memory has snapshots"
            log.warning(message, extra=Cause.NOTE.mark)
        self._rank, self._folder, self._device = rank, folder, device
        self._profile: profile | None = None
        self._span = ExitStack()

    def before_step(self, step: int) -> None:
        """In a selected step, begin a profiler span named after the step. In the first one, also start the profile."""
        if not self._chosen or not self._first <= step <= self._last:
            return
        if self._profile is None:
            self._first = step  # a run resumed within the span begins later
            if self._snapshot:
                torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
            cuda = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *cuda], record_shapes=True)
            self._profile.start()
        self._span.enter_context(record_function(f"step {step}"))

    def after_step(self, step: int) -> None:
        """End the span. After the last selected step, end the profile."""
        self._span.close()
        if self._profile is not None and step >= self._last:
            self._end(step)

    def after_run(self) -> None:
        self._span.close()
        if self._profile is not None:
            self._end("end")

    def _end(self, step: int | str) -> None:
        assert self._profile is not None
        finished, self._profile = self._profile, None
        self._chosen = False
        finished.stop()
        stem = self._folder / f"rank-{self._rank}-steps-{self._first}-{step}"
        self._write(stem.with_suffix(".json.gz"), lambda path: finished.export_chrome_trace(str(path)))
        if self._snapshot:
            self._write(stem.with_suffix(".pickle"), lambda path: torch.cuda.memory._dump_snapshot(str(path)))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, path: Path, export: Callable[[Path], object]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            export(path)
            log.info("profile written to %s", path)
        except (OSError, RuntimeError) as error:
            log.warning("the profile %s was not written: %s", path, error, extra=Cause.SIDE_SYSTEM.mark)
