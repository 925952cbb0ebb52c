"""The folders below `checkpoints/` of a run, by name, and the functions that find, rename and remove them.

step-00000100            complete, if it holds manifest.json
.partial-step-00000100   being written, or left by a process that died while writing: worthless
.pruned-step-00000100    being removed: worthless
.damaged-step-00000100   found damaged, no longer used; kept for the user
.aside-step-00000100     of a later step than the one a run went back to; kept for the user
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from forge.checkpoint.manifest import MANIFEST
from forge.errors import UserError
from forge.fault import fault_point

logger = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Return the name of a complete checkpoint's folder: step-00000100."""
    return f"step-{step:08d}"


def steps(root: Path, *, complete: bool = True) -> list[int]:
    """Return the steps that have a (complete) checkpoint folder, ascending; none if `root` does not exist."""
    if not root.is_dir():
        return []
    found = [match for path in root.iterdir() if (match := _STEP.fullmatch(path.name))]
    return sorted(int(m[1]) for m in found if not complete or (root / m[0] / MANIFEST).is_file())


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at `path`: that folder itself, or the newest complete one of the run there. Not verified.

    Raises UserError (exit 2) if there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    for root in (path / "checkpoints", path):
        if found := steps(root):
            return root / step_name(found[-1])
    raise UserError(
        f"{path}: {'does not exist' if not path.exists() else 'holds no complete checkpoint'}; name a checkpoint (a folder "
        f"with {MANIFEST}) or the folder of a run that has saved one"
    )


def set_aside(root: Path, step: int, why: str) -> str:
    """Rename `step-n` to `.{why}-step-n`, or `.{why}-step-n.k` if that exists; return the new name."""
    name = f".{why}-{step_name(step)}"
    taken = 0
    while (root / name).exists():
        taken += 1
        name = f".{why}-{step_name(step)}.{taken}"
    (root / step_name(step)).rename(root / name)
    return name


def sweep(root: Path) -> None:
    """Remove what killed saves and removals have left. Only one run may use the folder."""
    for pattern in (".partial-step-*", ".pruned-step-*"):
        for path in root.glob(pattern):
            logger.warning("removing %s, left by a process that ended while saving", path)
            shutil.rmtree(path)


def prune(root: Path, step: int, keep_last: int, keep_every: int) -> None:
    """Remove all but the newest `keep_last` (0: keep all) and those whose step is a multiple of `keep_every`.

    `step`, the one just saved, is for fault injection.
    """
    if keep_last == 0:
        return
    fault_point("save.before_prune", step)
    kept = steps(root)[-keep_last:]
    for old in steps(root, complete=False):
        if old >= kept[0] or (keep_every and old % keep_every == 0):
            continue
        path, removed = root / step_name(old), root / f".pruned-{step_name(old)}"
        # The manifest first: a process that dies below leaves a folder that is no longer taken for a checkpoint.
        (path / MANIFEST).unlink(missing_ok=True)
        fault_point("save.during_prune", step)
        path.rename(removed)
        shutil.rmtree(removed)
