"""`Checkpoints`: a run's checkpoint folder, through which the trainer saves, finds, verifies and loads."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup

from forge.checkpoint import folders, loading
from forge.checkpoint.commit import Contents, write_checkpoint
from forge.checkpoint.manifest import (
    FORMAT,
    Damaged,
    Unreachable,
    check_sizes,
    find_changed,
    is_tensors,
    read_manifest,
    share,
)
from forge.checkpoint.staging import Stager
from forge.checkpoint.tensors import NamedTensors
from forge.distributed import RanksFailed, gather_from_ranks, on_first_rank
from forge.errors import NO_CHECKPOINT, UserError
from forge.fault import fault_point

logger = logging.getLogger(__name__)

# A rank may have to write for long while others wait for it; whether training as a whole hangs is the
# watchdog's affair.
_PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class SaveOutcome:
    """How a save went, `seconds` from the call of `save` to the end; the same on every rank but for these.

    `error` is None when the checkpoint of `step` is complete.
    """

    step: int
    seconds: float
    error: str | None = None


class Checkpoints:
    """The checkpoints in `folder`. Every method is collective over all ranks, unless it says otherwise.

    `mode` "async" writes in a background thread while training goes on, "sync" before `save` returns. The
    newest `keep_last` checkpoints are kept (0: all), and for ever those whose step `keep_every` (0: none)
    divides. `group` is a gloo group of all ranks for decisions on the main thread; one is made when absent.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        mode: Literal["async", "sync"] = "async",
        group: ProcessGroup | None = None,
    ):
        self.folder = Path(folder)
        self.fallbacks: list[str] = []
        """What `latest` had to pass over, one sentence each; for the run's events."""
        self.failures_in_row = 0
        """Failed saves since the last good one, as of the last `save` or `wait`: the same on every rank."""
        self._keep_last, self._keep_every, self._mode = keep_last, keep_every, mode
        self._group = group or dist.new_group(backend="gloo", timeout=_PATIENCE)
        # Saving has a group of its own: two threads may not use one.
        self._saving_group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._stager = Stager()
        self._thread: threading.Thread | None = None
        self._last: SaveOutcome | None = None
        self._broken: Exception | None = None
        self._outcomes: deque[SaveOutcome] = deque()

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is or would be. Not collective."""
        return self.folder / folders.step_name(step)

    def save(
        self,
        step: int,
        tensors: NamedTensors,
        state: Mapping[str, Any],
        files: Mapping[str, bytes | Path],
        layout: Mapping[str, Any],
    ) -> list[SaveOutcome]:
        """Saves the checkpoint of `step`; parameters may change as soon as it returns.

        `state` (JSON) becomes trainer.json; `files` maps relative paths to bytes or to a file or folder to
        copy (only rank 0's count); `layout` (JSON) is recorded in the manifest. A save in flight is waited
        for first. A step that has a complete checkpoint is left alone. No failure that all ranks know of is raised:
        returns the outcome of every save that ended since last asked. One that they cannot know of, as when a rank
        is gone, is raised here and by whatever waits for the save.
        """
        began = time.monotonic()
        self._join()
        contents = self._stage(step, tensors, state, files, layout)
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
        """Saves that ended since last asked. Not collective: ranks may learn of an end at different times."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def wait(self) -> list[SaveOutcome]:
        """Waits for the save in flight, if any; returns the saves that ended since last asked."""
        self._join()
        return self.poll()

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, the newest first."""
        self._join()
        return on_first_rank("listing checkpoints", lambda: folders.steps(self.folder)[::-1], self._group)

    def latest(self, verify: bool = True, at_most: int | None = None) -> int | None:
        """The newest step, of those up to `at_most`, whose checkpoint is complete and as it was saved; None when there
        is none.

        A damaged one is renamed `.damaged-step-n`, loudly, and the next older is tried; see `fallbacks`. One that any
        rank cannot reach is not called damaged: `UserError` with exit code 77, and nothing is renamed.
        Without `verify` the tensors' files are compared by name and size only. `UserError` with exit code 77
        when all of the folder, without `at_most`, are damaged.
        """
        self._join()
        self.fallbacks = []
        try:
            candidates, remains = on_first_rank("listing checkpoints", self._list, self._group)
            for step in candidates:
                if at_most is not None and step > at_most:
                    continue
                problem = self.verify(self.path(step), contents=verify)
                if problem is None:
                    return step
                self._pass_over(step, problem)
        except RanksFailed as error:
            raise UserError(f"no checkpoint in {self.folder} can be used: {error}", NO_CHECKPOINT) from error
        if at_most is None and (candidates or remains):
            raise UserError(
                f"every checkpoint in {self.folder} is damaged and was renamed .damaged-step-*: restore one, "
                f"or begin anew with checkpoint.resume = none or under another run.name",
                NO_CHECKPOINT,
            )
        return None

    def verify(self, path: Path, contents: bool = True) -> str | None:
        """What is wrong with the checkpoint at `path`; None when it is as it was saved. `RanksFailed` if nobody can say.

        Sizes first; then every rank hashes a share of the files, of those with tensors only if `contents`.
        """
        manifest, problem = on_first_rank(
            "reading the manifest", lambda: _read_and_measure(path), self._group
        )
        if problem is not None:
            return problem
        if manifest["format"] != FORMAT:
            message = f"checkpoint {path} has format {manifest['format']}; this forge reads {FORMAT}"
            raise UserError(message, NO_CHECKPOINT)
        files = {name: entry for name, entry in manifest["files"].items() if contents or not is_tensors(name)}
        mine = share(files, dist.get_rank(self._group), dist.get_world_size(self._group))
        found = gather_from_ranks("hashing the checkpoint", lambda: find_changed(path, mine), self._group)
        problems = [problem for part in found for problem in part]
        more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
        return f"{problems[0]}{more}" if problems else None

    def load(self, path: Path, tensors: NamedTensors) -> None:
        """Fills the values in place from the checkpoint at `path`: see `loading.load`."""
        self._join()
        loading.load(path, tensors, self._group)

    def set_aside_after(self, step: int) -> list[str]:
        """Renames every checkpoint of a later step to `.aside-step-n`; returns the new names."""
        self._join()
        return on_first_rank(
            "setting checkpoints aside", lambda: _set_aside_after(self.folder, step), self._group
        )

    def _stage(
        self,
        step: int,
        tensors: NamedTensors,
        state: Mapping[str, Any],
        files: Mapping[str, bytes | Path],
        layout: Mapping[str, Any],
    ) -> Callable[[], Contents]:
        """What to write; where staging failed, a function that raises when the ranks come to agree on it."""
        try:
            fault_point("save.begin", step)
            text = json.dumps(state, indent=1)
            contents = Contents(step, dict(layout), text, dict(files), self._stager.stage(tensors))
        except Exception as error:
            failure = error

            def fail() -> Contents:
                raise failure

            return fail
        return lambda: contents

    def _write(self, step: int, contents: Callable[[], Contents], began: float) -> None:
        """Runs in the thread: whatever all ranks know of becomes an outcome."""
        error = None
        try:
            write_checkpoint(
                self.folder, contents, step, self._keep_last, self._keep_every, self._saving_group
            )
        except RanksFailed as failure:
            error = str(failure)
        except Exception as failure:
            self._broken = failure
            return
        self._last = SaveOutcome(step, time.monotonic() - began, error)
        self._outcomes.append(self._last)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._broken is not None:
            raise self._broken
        if self._last is not None:
            self.failures_in_row = 0 if self._last.error is None else self.failures_in_row + 1
            self._last = None

    def _list(self) -> tuple[list[int], bool]:
        """Steps with a folder, newest first. One without a manifest is no checkpoint, but to begin anew because
        somebody has deleted that one file would be worse than to call it damaged."""
        return folders.steps(self.folder, complete=False)[::-1], folders.has_damaged(self.folder)

    def _pass_over(self, step: int, problem: str) -> None:
        name = on_first_rank(
            "setting a damaged checkpoint aside",
            lambda: folders.set_aside(self.folder, step, "damaged"),
            self._group,
        )
        message = f"checkpoint {self.path(step)} is damaged: {problem}; renamed {name} and passed over"
        self.fallbacks.append(message)
        if dist.get_rank(self._group) == 0:
            logger.error(message)


def _read_and_measure(path: Path) -> tuple[dict[str, Any], str | None]:
    try:
        manifest = read_manifest(path)
        if manifest["format"] == FORMAT:
            check_sizes(path, manifest)
    except Unreachable:
        raise
    except Damaged as error:
        return {}, str(error)
    return manifest, None


def _set_aside_after(folder: Path, step: int) -> list[str]:
    names = []
    for later in folders.steps(folder):
        if later > step:
            names.append(folders.set_aside(folder, later, "aside"))
            logger.warning(
                "checkpoint %s is after step %d: renamed %s",
                folder / folders.step_name(later),
                step,
                names[-1],
            )
    return names
