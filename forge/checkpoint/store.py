"""`Checkpoints`: saves, finds, verifies and loads the checkpoints of a run.

`Stager`: host-memory copies of this rank's checkpoint tensors, for writing while training continues.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from forge.checkpoint import folders, loading
from forge.checkpoint.commit import Contents, write_checkpoint
from forge.checkpoint.manifest import find_damage
from forge.checkpoint.tensors import NamedTensors, ShardTensor, writes
from forge.runtime.causes import Cause
from forge.runtime.distributed import RanksFailed, on_first_rank
from forge.runtime.errors import NO_CHECKPOINT, UserError
from forge.runtime.fault import fault_point
from forge.shard import local

logger = logging.getLogger(__name__)

# A rank may write for a long time while others wait. Detecting hangs is the watchdog's task.
_TIMEOUT = timedelta(hours=2)
# PyTorch rounds pinned allocations up to a power of two, so tensors share blocks whose size is a power of two.
BLOCK = 1 << 30
_ALIGNMENT = 64


@dataclass(frozen=True)
class SaveOutcome:
    """The result of a save.

    seconds: from the call of `save` to the end of the save on this rank; all other fields are equal on every rank.
    error: the message of a failure; None if the checkpoint of `step` is complete. cause: the cause of a failure.
    """

    step: int
    seconds: float
    error: str | None = None
    cause: Cause = Cause.SAVE_FAILED


class Checkpoints:
    """The checkpoints in `folder`. Methods are collective over all ranks unless their docstring says otherwise.

    mode: "async" writes in a background thread while training continues, "sync" before `save` returns. keep_last:
    number of newest checkpoints to keep (0: all). keep_every: also keep the `milestones` of this number (0: none). group:
    gloo group of all ranks for the main thread; made if None. write: function that writes one checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        mode: Literal["async", "sync"] = "async",
        group: ProcessGroup | None = None,
        write: Callable[..., object] = write_checkpoint,
    ):
        self.folder = Path(folder)
        self.fallbacks: list[str] = []
        """Damaged checkpoints skipped by `latest`, one sentence each, for the run's events."""
        self.failures_in_row = 0
        """Failed saves since the last successful one, as of the last `save` or `wait`. Equal on every rank."""
        self._keep_last, self._keep_every, self._mode, self._write_one = keep_last, keep_every, mode, write
        self._group = group or dist.new_group(backend="gloo", timeout=_TIMEOUT)
        # Saving has its own group, because two threads must not share a group.
        self._saving_group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._stager = Stager()
        self._thread: threading.Thread | None = None
        self._last: SaveOutcome | None = None
        self._broken: Exception | None = None
        self._outcomes: deque[SaveOutcome] = deque()

    def path(self, step: int) -> Path:
        """Return the folder for the checkpoint of `step`, existing or not. Not collective."""
        return self.folder / folders.step_name(step)

    def save(
        self,
        step: int,
        tensors: NamedTensors,
        state: Mapping[str, Any],
        files: Mapping[str, bytes],
        layout: Mapping[str, Any],
    ) -> list[SaveOutcome]:
        """Save the checkpoint of `step`. Collective. Parameters may change after the return.

        state: JSON content of trainer.json. files: other files, relative path -> content. Rank 0 writes both. layout:
        JSON, recorded in the manifest. First waits for the save in flight. Does nothing if the step already has a
        complete checkpoint.

        Return the outcome of every save that ended since the last call of `save`, `poll` or `wait`. A failure known to
        all ranks is returned as an outcome. Any other failure, e.g. a lost rank, is raised by this method and by all
        methods that wait for the save.
        """
        began = time.monotonic()
        self._join()
        contents: Contents | Exception
        try:
            fault_point("save.begin", step)
            all_files = {loading.TRAINER: json.dumps(state, indent=1).encode(), **files}
            contents = Contents(step, dict(layout), all_files, self._stager.stage(tensors))
        except Exception as error:  # raised in `_write_one`, where all ranks learn of it
            contents = error
        if self._mode == "async":
            self._thread = threading.Thread(
                target=self._write, args=(step, contents, began), name=f"save-{step}", daemon=True
            )
            self._thread.start()
        else:
            self._write(step, contents, began)
            self._join()
        return self.poll()

    def poll(self) -> list[SaveOutcome]:
        """Return the outcomes of saves that ended since the last call.

        Not collective: ranks may see the end of a save at different times.
        """
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def wait(self) -> list[SaveOutcome]:
        """Wait for the save in flight, if any. Return the outcomes of saves that ended since the last call. Collective."""
        self._join()
        return self.poll()

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, the newest first. Collective."""
        self._join()
        return on_first_rank("listing checkpoints", lambda: folders.steps(self.folder)[::-1], self._group)

    def latest(self, verify: bool = True, at_most: int | None = None) -> int | None:
        """Return the newest step, up to `at_most`, with an undamaged checkpoint; None if there is none.

        Collective. A damaged checkpoint is logged as an error, added to `fallbacks` and renamed `.damaged-step-n`; then
        the next older checkpoint is tried. Without `verify`, only the names and sizes of tensor files are checked.

        Raises UserError (exit 77) if a rank cannot read a checkpoint or, without `at_most`, if all checkpoints are
        damaged. An unreadable checkpoint may be intact, so it is not renamed.
        """
        self._join()
        self.fallbacks = []
        try:
            # A folder without a manifest counts as damaged, so a run whose manifests were deleted does not silently
            # start over.
            candidates, damaged = on_first_rank(
                "listing checkpoints",
                lambda: (
                    folders.steps(self.folder, complete=False)[::-1],
                    any(self.folder.glob(".damaged-step-*")),
                ),
                self._group,
            )
            for step in candidates:
                if at_most is not None and step > at_most:
                    continue
                problem = self.verify(self.path(step), contents=verify)
                if problem is None:
                    return step
                rename = functools.partial(folders.set_aside, self.folder, step, "damaged")
                name = on_first_rank("setting a damaged checkpoint aside", rename, self._group)
                self.fallbacks.append(
                    f"checkpoint {self.path(step)} is damaged: {problem}; it was renamed to {name}"
                )
                if dist.get_rank(self._group) == 0:
                    logger.error("%s", self.fallbacks[-1], extra=Cause.FALLBACK.mark)
        except RanksFailed as error:
            raise UserError(f"no checkpoint in {self.folder} can be used: {error}", NO_CHECKPOINT) from error
        if at_most is None and (candidates or damaged):
            raise UserError(
                f"every checkpoint in {self.folder} is damaged and was renamed to .damaged-step-*. Restore one of them, or "
                "start over with another run.name. To start over under the same name, set checkpoint.resume = none and "
                "remove origin.json",
                NO_CHECKPOINT,
            )
        return None

    def verify(self, path: Path, contents: bool = True) -> str | None:
        """Return a description of the damage of the checkpoint at `path`; None if it is undamaged.

        Collective (see `manifest.find_damage`).
        """
        return find_damage(path, contents=contents, group=self._group)

    def load(self, path: Path, tensors: NamedTensors) -> None:
        """Fill `tensors` in place from the checkpoint at `path`. Collective (see `loading.load`)."""
        self._join()
        loading.load(path, tensors, self._group)

    def set_aside_after(self, step: int, damaged: bool = False) -> list[str]:
        """Rename every checkpoint after `step` (-1: all) to `.aside-step-n`. Return the new names. Collective.

        damaged: also rename damaged checkpoints (`.damaged-step-n`). After them, `latest` would refuse a restart of a
        history without a checkpoint in this folder.
        """
        self._join()

        def rename() -> list[str]:
            names = []
            for later in folders.steps(self.folder):
                if later > step:
                    names.append(folders.set_aside(self.folder, later, "aside"))
                    why = "belongs to another history" if step < 0 else f"is later than step {step}"
                    message = "checkpoint %s %s: renamed to %s"
                    logger.warning(message, self.path(later), why, names[-1], extra=Cause.SET_ASIDE.mark)
            renamed = folders.set_damaged_aside(self.folder) if damaged else []
            if renamed:
                message = "damaged checkpoints in %s do not belong to the current history: renamed to %s"
                logger.warning(message, self.folder, ", ".join(renamed), extra=Cause.SET_ASIDE.mark)
            return names + renamed

        return on_first_rank("setting checkpoints aside", rename, self._group)

    def _write(self, step: int, contents: Contents | Exception, began: float) -> None:
        """Write a checkpoint, in the background thread if the mode is "async".

        Records success, or a failure known to all ranks, as a SaveOutcome. `_join` raises any other failure.
        """
        error, cause = None, Cause.SAVE_FAILED
        try:
            self._write_one(
                self.folder, step, contents, self._keep_last, self._keep_every, self._saving_group
            )
        except RanksFailed as failure:
            error = str(failure)
            cause = failure.cause if failure.cause is Cause.DISK_FULL else cause
        except Exception as failure:
            self._broken = failure
            return
        self._last = SaveOutcome(step, time.monotonic() - began, error, cause)
        self._outcomes.append(self._last)

    def _join(self) -> None:
        """Wait for the save in flight and update `failures_in_row`.

        All ranks wait in the same call, so the counts agree. Raises the save's failure unless all ranks know it.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._broken is not None:
            raise self._broken
        if self._last is not None:
            self.failures_in_row = 0 if self._last.error is None else self.failures_in_row + 1
            self._last = None


class Stager:
    """Copies tensors into CPU buffers. Every save reuses the buffers, so a copy is valid only until the next call."""

    def __init__(self) -> None:
        self._form: object = None
        self._buffers: dict[str, Tensor] = {}

    def stage(self, tensors: NamedTensors) -> dict[str, ShardTensor]:
        """Copy the tensors that this rank writes, and return the copies by name.

        Synchronises with the device. The originals may change after the return.
        """
        own = {
            name: (shard, local(values).detach())
            for name, (shard, values) in tensors.items()
            if writes(name, shard)
        }
        self._allocate({name: values for name, (_, values) in own.items()})
        for name, (_, values) in own.items():
            self._buffers[name].copy_(values, non_blocking=True)
        if any(values.is_cuda for _, values in own.values()):
            torch.cuda.current_stream().synchronize()
        return {name: ShardTensor(shard, self._buffers[name]) for name, (shard, _) in own.items()}

    def _allocate(self, tensors: dict[str, Tensor]) -> None:
        """Allocate `_buffers`: a buffer for each of `tensors`, within a few large blocks of memory.

        Do nothing if names, shapes and dtypes are unchanged.
        """
        form = [(name, values.shape, values.dtype) for name, values in tensors.items()]
        if form == self._form:
            return
        self._form, self._buffers = None, {}  # free the blocks first
        sizes, places = blocks_for([values.nbytes for values in tensors.values()])
        pinned = any(values.is_cuda for values in tensors.values())
        blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned).numpy() for size in sizes]
        for (name, values), (block, start) in zip(tensors.items(), places, strict=True):
            # Through NumPy, each buffer has its own storage. DCP would copy a slice of a larger storage before writing.
            flat = torch.from_numpy(blocks[block][start : start + values.nbytes])
            self._buffers[name] = flat.view(values.dtype).view(values.shape)
        self._form = form


def blocks_for(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the block sizes for tensors of `sizes` bytes, and (block index, first byte in the block) of each tensor.

    Block sizes are powers of two, at most BLOCK bytes unless a tensor is larger.
    """
    rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    left, blocks, used = sum(rounded), list[int](), list[int]()
    places: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    # The largest tensors first; smaller tensors then fill the remaining space.
    for number in sorted(range(len(sizes)), key=lambda number: -rounded[number]):
        size = rounded[number]
        block = next(
            (b for b, (whole, taken) in enumerate(zip(blocks, used, strict=True)) if taken + size <= whole),
            None,
        )
        if block is None:
            block = len(blocks)
            # A block is no larger than the remaining tensors together, so the last blocks are nearly full too.
            most = min(BLOCK, 1 << max(left, 1).bit_length() - 1)
            blocks.append(max(most, 1 << max(size - 1, 0).bit_length()))
            used.append(0)
        places[number] = block, used[block]
        used[block] += size
        left -= size
    return blocks, places
