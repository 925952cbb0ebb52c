"""Returning to the last good checkpoint without ending the run, and remembering it for every resume after.

A roll-back must not be forgotten: a run that is killed before its next checkpoint would read the bad data again, and its
history would be another one. So `rollbacks.json` in the run directory has all of this history, and so has each checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from forge.checkpoint import Checkpoints, read_state
from forge.distributed import on_first_rank
from forge.errors import FAILED, UserError
from forge.files import replace_atomically
from forge.observe.run_directory import RunDirectory
from forge.train.judge import Setback
from forge.train.resume import Origin
from forge.train.state import Progress, Rollback

if TYPE_CHECKING:
    from forge.train.loop import Training

log = logging.getLogger(__name__)


def remember(directory: RunDirectory, origin: Origin | None, progress: Progress) -> None:
    """Make `progress`, as loaded from `origin` (None: a new history), and `rollbacks.json` know the same. Collective."""
    ours = origin is not None and origin.path.parent.resolve() == directory.checkpoints.resolve()

    def agree() -> list[Rollback]:
        there = _read(directory) if ours else []
        both = there + [rollback for rollback in progress.rollbacks if rollback not in there]
        if both != there or not ours:
            _write(directory, both)
        return both

    progress.pass_over(on_first_rank("reading and writing rollbacks.json", agree))


class Rollbacks:
    """Does all the roll-backs of a run. `tell(kind, **fields)` writes an event."""

    def __init__(self, directory: RunDirectory, checkpoints: Checkpoints, tell: Callable[..., None]):
        self._directory, self._checkpoints, self._tell = directory, checkpoints, tell

    def __call__(self, training: Training, setback: Setback) -> None:
        """Take `training` back to the newest good checkpoint from before `setback`. Collective.

        Raises UserError (exit 1) if there is none, or if too many returns have not helped.
        """
        progress = training.progress
        assert setback.last_step == progress.step
        training.phases.enter("set-up", progress.step)
        origin = self._origin(training, setback)
        first = int(origin.state["progress"]["next_sample"])
        end = progress.next_sample if setback.pass_over else first
        rollback = Rollback(setback.last_step, origin.step, first, end)
        over = f", passing over samples {first} to {end - 1}" if setback.pass_over else ""
        log.warning("%s. Back to step %d%s", setback, origin.step, over)
        self._tell("rolled_back", reason=str(setback), **asdict(rollback))
        # In this order: a kill in between leaves a run that finds the same trouble, or one that knows of it already.
        self._checkpoints.set_aside_after(origin.step)
        known = [*progress.rollbacks, rollback]
        on_first_rank("writing rollbacks.json", lambda: _write(self._directory, known))
        training.begin_after(origin, known)

    def _origin(self, training: Training, setback: Setback) -> Origin:
        """The checkpoint to return to."""
        limit, verify = training.config.resilience.max_rollbacks, training.config.checkpoint.verify
        steps = self._checkpoints.steps()
        # What lies before the newest checkpoint is overcome.
        vain = [one for one in training.progress.rollbacks if one.from_step >= max(steps, default=0)]
        if len(vain) >= limit:
            tried = f", and {len(vain)} roll-backs have not helped" if vain else ""
            raise UserError(
                f"{setback}{tried} (resilience.max_rollbacks = {limit}). Before you start again from the last checkpoint: "
                f"{setback.remedy}.",
                exit_code=FAILED,
            )
        # Trouble right behind a checkpoint that has been returned to may be its own: try the one before it, if any.
        returned_to = [one.to_step for one in vain if one.to_step == setback.first_bad - 1]
        for bound in (min([setback.first_bad, *returned_to]), setback.first_bad):
            step = self._checkpoints.latest(verify, at_most=bound - 1)
            for fallback in self._checkpoints.fallbacks:
                self._tell("fallback", problem=fallback)
            if step is not None:
                path = self._checkpoints.path(step)
                return Origin(path, read_state(path))
        raise UserError(
            f"{setback}. There is no checkpoint from before step {setback.first_bad} to return to.",
            exit_code=FAILED,
        )


def _read(directory: RunDirectory) -> list[Rollback]:
    if not directory.rollbacks.exists():
        return []
    return [Rollback(**one) for one in json.loads(directory.rollbacks.read_text())]


def _write(directory: RunDirectory, rollbacks: list[Rollback]) -> None:
    if rollbacks or directory.rollbacks.exists():
        content = json.dumps([asdict(one) for one in rollbacks], indent=1)
        replace_atomically(directory.rollbacks, content.encode())
