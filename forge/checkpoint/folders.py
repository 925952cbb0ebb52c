"""The folders in a run's `checkpoints/`, and the functions to find, rename and remove them.

step-00000100            complete if it has a manifest.json
.partial-step-00000100   being written or restored, or left by a dead process; safe to delete
.pruned-step-00000100    being removed; safe to delete
.damaged-step-00000100   found damaged and no longer used; kept for the user
.aside-step-00000100     set aside because the run went back to an earlier step; kept for the user
.mirrored-step-00000100.1    links to a checkpoint that is being copied to the mirror
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from forge.checkpoint.manifest import MANIFEST
from forge.runtime.causes import Cause
from forge.runtime.errors import UserError, unreadable
from forge.runtime.fault import fault_point

logger = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d{8,})")
# Leftovers that cannot be removed and have been reported; each is reported once per process.
_reported: set[Path] = set()


def step_name(step: int) -> str:
    """Return the name of a complete checkpoint's folder: step-00000100."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a complete checkpoint's folder; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def steps(root: Path, *, complete: bool = True) -> list[int]:
    """Return the steps with a checkpoint folder, ascending; empty if `root` does not exist.

    complete: only steps whose folder has a manifest.
    """
    if not root.is_dir():
        return []
    found = ((step_of(path.name), path) for path in root.iterdir())
    return sorted(
        step for step, path in found if step is not None and (not complete or (path / MANIFEST).is_file())
    )


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at `path`: `path` itself, or the newest complete checkpoint of the run directory `path`.

    The checkpoint is not verified. Raises UserError (exit 2) if there is none.
    """
    try:
        if (path / MANIFEST).is_file():
            return path
        for root in (path / "checkpoints", path):
            if found := steps(root):
                return root / step_name(found[-1])
    except OSError as error:  # e.g. a folder without search permission
        raise unreadable(path, error) from None
    raise UserError(
        f"{path}: {'does not exist' if not path.exists() else 'holds no complete checkpoint'}; name a checkpoint (a folder "
        f"with {MANIFEST}) or the folder of a run that has saved one"
    )


def is_empty(root: Path) -> bool:
    """Return whether `root` has no folder of a complete, incomplete or damaged checkpoint.

    Checkpoints set aside (`.aside-step-n`) do not count.
    """
    if not root.is_dir():
        return True
    names = (path.name for path in root.iterdir())
    return not any(re.match(r"(\.damaged-)?step-\d{8,}", name) for name in names)


def set_aside(root: Path, step: int, why: str) -> str:
    """Rename `step-n` to `.{why}-step-n`, or to `.{why}-step-n.k` if the name is taken. Return the new name."""
    target = _unused(root / f".{why}-{step_name(step)}")
    (root / step_name(step)).rename(target)
    return target.name


def set_damaged_aside(root: Path) -> list[str]:
    """Rename every `.damaged-step-n` to `.aside-step-n`, or to `.aside-step-n.k` if the name is taken.

    Return the new names.
    """
    names = []
    for damaged in sorted(root.glob(".damaged-step-*")):
        target = _unused(root / damaged.name.replace(".damaged-", ".aside-", 1))
        damaged.rename(target)
        names.append(target.name)
    return names


def start_partial(root: Path, step: int) -> Path:
    """Make and return the empty folder `.partial-step-n`.

    An existing folder of this name is removed or, if that fails, renamed.
    """
    partial = root / f".partial-{step_name(step)}"
    if partial.exists() and not _remove(partial):
        partial.rename(_unused(root / f".pruned-{step_name(step)}"))
    partial.mkdir(parents=True)
    return partial


def sweep(root: Path) -> None:
    """Remove the leftovers of killed saves and removals, and log each.

    Only one run may use the folder. A removal may fail on NFS, which keeps `.nfs*` files in a folder as long as a
    process has them open.
    """
    for pattern in (".partial-step-*", ".pruned-step-*"):
        for path in root.glob(pattern):
            if path not in _reported:
                message = "removing %s, left by a process that ended while saving"
                logger.warning(message, path, extra=Cause.LEFTOVER.mark)
            _remove(path)


def remove_links(root: Path) -> None:
    """Remove the links that the mirror of an ended process has left. Call before this process makes a `Mirror`."""
    for path in root.glob(".mirrored-step-*"):
        _remove(path)


def milestones(steps: Iterable[int], keep_every: int) -> set[int]:
    """Return the first of `steps` at or after each multiple of `keep_every` (0: none), up to the next multiple.

    With time-based saves, few steps are multiples.
    """
    first: dict[int, int] = {}
    for step in sorted(steps) if keep_every else ():
        first.setdefault(step // keep_every, step)
    return {step for multiple, step in first.items() if multiple > 0 or step == 0}


def prune(root: Path, keep_last: int, keep_every: int, step: int = -1) -> None:
    """Remove old checkpoints. Keep the newest `keep_last` (0: all), the `milestones` of `keep_every`, and links.

    step: the last saved step, for fault injection. Raises OSError if a manifest cannot be removed.
    """
    if keep_last == 0:
        return
    fault_point("save.before_prune", step)
    complete = steps(root)
    kept, milestone = complete[-keep_last:], milestones(complete, keep_every)
    for old in steps(root, complete=False):
        if not kept or old >= kept[0] or old in milestone:
            continue
        path, removed = root / step_name(old), _unused(root / f".pruned-{step_name(old)}")
        if path.is_symlink():
            continue  # a user's link, perhaps to another run's checkpoint
        # Remove the manifest first: if the process dies afterwards, the folder no longer counts as a checkpoint.
        (path / MANIFEST).unlink(missing_ok=True)
        fault_point("save.during_prune", step)
        path.rename(removed)
        _remove(removed)


def _unused(path: Path) -> Path:
    """Return `path`, or `path.k` with the smallest k = 1, 2, ... that does not exist."""
    taken, free = 0, path
    while free.exists():
        taken += 1
        free = path.with_name(f"{path.name}.{taken}")
    return free


def _remove(path: Path) -> bool:
    """Remove the folder at `path`. Return True if it no longer exists. A failure is logged once per folder and process."""
    try:
        shutil.rmtree(path)
        return True
    except OSError as error:
        if path not in _reported:
            _reported.add(path)
            message = "could not remove %s, which stays for now: %s"
            logger.warning(message, path, error, extra=Cause.NOT_REMOVED.mark)
        return False
