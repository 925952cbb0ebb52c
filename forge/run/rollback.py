"""Find the checkpoint for a roll-back, and record roll-backs.

`rollbacks.json` in the run directory lists all roll-backs of the run, and so does each checkpoint. Without the file, a
run killed between a roll-back and its next checkpoint would read the bad data again.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forge.checkpoint import Checkpoints, read_state
from forge.config import Config
from forge.observe.run_directory import RunDirectory
from forge.run.origin import Origin, read_origin
from forge.run.resume import ResumePoint, Start
from forge.runtime.causes import Cause
from forge.runtime.distributed import on_first_rank
from forge.runtime.errors import FAILED, RollbackRequired, UserError
from forge.runtime.files import replace_atomically
from forge.train.state import Progress, Rollback

log = logging.getLogger(__name__)


def find_rollback_point(
    required: RollbackRequired,
    progress: Progress,
    checkpoints: Checkpoints,
    config: Config,
    directory: RunDirectory,
    report_event: Callable[..., None],
) -> ResumePoint:
    """Return the newest good checkpoint before the first bad step. Collective.

    If there is none, return the run's starting checkpoint (origin.json), provided it is good and earlier than the first
    bad step. If there is neither, return a checkpoint between skipped steps: a skipped step changes nothing, so its state
    is that before the first of them. Raises UserError (exit 1) if there is none, or after too many roll-backs.
    """
    limit, verify = config.resilience.max_rollbacks, config.checkpoint.verify
    origin = on_first_rank("reading origin.json", lambda: recorded_origin(directory))
    begun = origin.step if origin is not None else 0
    # A checkpoint saved since the last roll-back proves that the roll-back helped.
    last_saved = max(checkpoints.steps(), default=begun)
    failed_rollbacks = [one for one in progress.rollbacks if one.from_step >= last_saved]
    if len(failed_rollbacks) >= limit:
        tried = f", and {len(failed_rollbacks)} roll-backs have not helped" if failed_rollbacks else ""
        raise UserError(
            f"{required}{tried} (resilience.max_rollbacks = {limit}). Before you start again from the last checkpoint: "
            f"{required.remedy}.",
            FAILED,
            required.cause,
        )
    # A fault right after the target of an earlier roll-back may come from that checkpoint. Try an older checkpoint
    # first, if any.
    suspects = [one.to_step for one in failed_rollbacks if one.to_step == required.first_bad - 1]

    def newest(at_most: int) -> ResumePoint | None:
        step = checkpoints.latest(verify, at_most=at_most)
        for fallback in checkpoints.fallbacks:
            report_event(Cause.FALLBACK, problem=fallback)
        if step is None:
            return None
        return ResumePoint(checkpoints.path(step), read_state(checkpoints.path(step)))

    for bound in (min([required.first_bad, *suspects]), required.first_bad):
        if (point := newest(bound - 1)) is not None:
            return point
        if origin is not None and origin.path is not None and begun < bound:
            path = Path(origin.path)
            if checkpoints.verify(path, verify) is None:
                return ResumePoint(path, read_state(path))
    point = newest(required.last_step) if required.cause is Cause.BAD_STEPS else None
    if point and point.step - point.state["progress"]["skipped_in_a_row"] < required.first_bad:
        return point
    raise UserError(
        f"{required}. There is no checkpoint before step {required.first_bad} to return to.",
        FAILED,
        required.cause,
    )


def merged_rollbacks(
    directory: RunDirectory, start: Start, progress: Progress, new: Sequence[Rollback] = ()
) -> list[Rollback]:
    """Return the roll-backs in `rollbacks.json` and in `progress` (loaded from `start`), then the `new` ones. Collective.

    Leave out entries of the file that are from another history, or from the abandoned part of this history.
    """
    # A start that replaces a history continues it up to the step `kept`; -1: not at all.
    last = start.kept if start.replaces or start.kept < 0 else math.inf

    def merge() -> list[Rollback]:
        found = read_rollbacks(directory)
        written = [one for one in (Rollback(**one) for one in found) if one.from_step <= last]
        # A new roll-back may equal an earlier one if the same fault has recurred; both count.
        return [*written, *(one for one in progress.rollbacks if one not in written), *new]

    return on_first_rank("reading rollbacks.json", merge)


def write_rollbacks(directory: RunDirectory, progress: Progress) -> None:
    """Write the roll-backs in `progress` to `rollbacks.json`, unless the file has them. Collective."""
    known = [asdict(one) for one in progress.rollbacks]

    def write() -> None:
        if known != read_rollbacks(directory):
            replace_atomically(directory.rollbacks, json.dumps(known, indent=1).encode())

    on_first_rank("writing rollbacks.json", write)


def read_rollbacks(directory: RunDirectory) -> list[dict[str, Any]]:
    """Return the content of `rollbacks.json`; an empty list if the file does not exist.

    Raises UserError (exit 2) for invalid content.
    """
    try:
        found = json.loads(directory.rollbacks.read_bytes())
    except FileNotFoundError:
        return []
    except ValueError as error:
        found = error
    if not (isinstance(found, list) and all(isinstance(one, dict) for one in found)):
        raise UserError(
            f"{directory.rollbacks} cannot be read as JSON; remove this file. The newest checkpoint lists all "
            "roll-backs before it. The run forgets later roll-backs, and repeats them if their causes recur"
        )
    return found


def is_abandoned(checkpoint: Path, rollbacks: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a later roll-back has left the steps before a checkpoint or node-local state.

    rollbacks: all roll-backs of the run. The checkpoint lists those before its step.
    """
    progress = read_state(checkpoint)["progress"]
    return any(one["to_step"] < progress["step"] for one in rollbacks[len(progress["rollbacks"]) :])


def recorded_origin(directory: RunDirectory) -> Origin | None:
    """Return the content of origin.json, i.e. how the run began. If it cannot be read, log a warning and return None."""
    try:
        return read_origin(directory)
    except (UserError, OSError) as error:
        log.warning("%s", error, extra=Cause.LINES_LOST.mark)
        return None
