"""Find the start of a run: the newest usable checkpoint, a checkpoint named by the user, given weights, or step 0."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge.checkpoint import Checkpoints, find_checkpoint, read_state
from forge.checkpoint.folders import step_of
from forge.checkpoint.loading import Fetch
from forge.config import Config
from forge.config.phases import with_steps
from forge.observe.run_directory import RunDirectory
from forge.run.changes import compare_for_init, compare_for_resume
from forge.run.origin import (
    Earlier,
    Origin,
    log_that_origins_count_once,
    new_history_because,
    origin_of,
)
from forge.runtime.causes import Cause
from forge.runtime.distributed import RanksFailed, on_first_rank
from forge.runtime.errors import NO_CHECKPOINT, UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run continues, and its JSON state.

    fetch: copies the checkpoint's files to this node (see `load`); None: the node can read all files at `path`. shared:
    folder of the run's checkpoints, if `path` is a node-local state, which no key of [checkpoint] can name; else None.
    """

    path: Path
    state: dict[str, Any]
    fetch: Fetch | None = None
    shared: Path | None = None

    @property
    def step(self) -> int:
        return int(self.state["progress"]["step"])

    @property
    def tokens(self) -> int:
        return int(self.state["progress"]["tokens"])

    def continued(self, config: Config) -> Config:
        """Return `config` with the `train.steps` of a run that continues from here."""
        return with_steps(config, self.step, self.tokens)


@dataclass(frozen=True)
class Start:
    """The state from which a run starts, or the target of a roll-back.

    point: the checkpoint; None: step 0. kept: the last step in the run directory that remains valid; later checkpoints
    and metrics are set aside. -1: no step in the directory belongs to this run. origin: the origin to write to origin.json
    if a new history begins; None: the history continues. replaces: True if the directory may hold an earlier run, whose
    files must be set aside.
    """

    point: ResumePoint | None
    kept: int
    origin: Origin | None = None
    replaces: bool = False


def find_start(config: Config, checkpoints: Checkpoints, directory: RunDirectory, earlier: Earlier) -> Start:
    """Find the start of a run, by `checkpoint.resume` and the run directory. Verify its checkpoint. Collective.

    Raises UserError with exit code 77 if checkpoints exist or existed but none is usable, or if the named checkpoint is
    damaged. Raises UserError with exit code 2 if the named checkpoint does not exist, or if the config changes a key that
    the checkpoint fixes.
    """
    wanted, verify = config.checkpoint.resume, config.checkpoint.verify
    asked, replaced, saved = on_first_rank(
        "reading origin.json",
        lambda: (origin_of(config), new_history_because(config, directory, earlier), earlier.saved),
    )
    if replaced is None:
        step = checkpoints.latest(verify=verify)
        if step is not None:
            log_that_origins_count_once(config, checkpoints.path(step))
            return Start(resume_point(checkpoints.path(step), config), kept=step)
        if saved:
            raise UserError(
                f"{checkpoints.folder} holds no checkpoint, but the run has saved step {saved}. Bring the checkpoints back "
                "(is their file system mounted?), or begin a new run under another run.name; nothing was changed",
                NO_CHECKPOINT,
            )
    named = asked.path or asked.init
    if named:
        _require_sound(
            Path(named), checkpoints, "checkpoint.resume" if asked.path else "checkpoint.init", verify
        )
    if replaced is not None and checkpoints.steps():
        message = "checkpoint.resume = %s begins a new history: %s"
        log.warning(message, wanted, replaced, extra=Cause.SET_ASIDE.mark)
    if asked.path is None:
        if asked.init and replaced is not None and _is_in(Path(asked.init), checkpoints.folder):
            raise UserError(
                f"checkpoint.init = {asked.init!r}: is a checkpoint of this run, whose new history would set it aside; "
                "use another run.name"
            )
        if asked.init:
            compare_for_init(Path(asked.init), config)
        return Start(None, kept=-1, origin=asked, replaces=replaced is not None)
    path = Path(wanted)
    point = resume_point(path, config, branch=True)
    own = path.resolve() == checkpoints.path(point.step).resolve()
    kept = point.step if own or replaced is None else -1
    return Start(point, kept, replace(asked, step=point.step), replaces=replaced is not None)


def _is_in(path: Path, folder: Path) -> bool:
    """Return whether `path` is a checkpoint of the run whose checkpoints are in `folder`."""
    path = path.resolve()
    return path.parent == folder.resolve() and step_of(path.name) is not None


def resume_point(
    path: Path,
    config: Config,
    branch: bool = False,
    fetch: Fetch | None = None,
    shared: Path | None = None,
) -> ResumePoint:
    """Return the checkpoint at `path` as a resume point. Raises UserError if `config` cannot continue the checkpoint.

    fetch, shared: see `ResumePoint`.
    """
    point = ResumePoint(path, read_state(path), fetch, shared)
    if "progress" not in point.state:
        raise UserError(
            f"checkpoint.resume = {config.checkpoint.resume!r}: the checkpoint was imported, so it has weights but no "
            "history to continue; begin a new history with checkpoint.init"
        )
    compare_for_resume(path, point.step, config, branch, shared)
    return point


def _require_sound(path: Path, checkpoints: Checkpoints, key: str, verify: bool) -> None:
    try:
        problem = checkpoints.verify(path, contents=verify)
    except RanksFailed as error:
        problem = str(error)
    if problem is None:
        return
    if (path / "config.json").is_file():
        remedy = "convert it with scripts/convert.py from-hf"
        raise UserError(f"{key} = {str(path)!r}: is a Hugging Face checkpoint; {remedy}")
    try:
        newest = find_checkpoint(path)
    except UserError as error:
        raise UserError(f"{key} = {error}") from None
    if newest != path:
        raise UserError(f"{key} = {str(path)!r}: {problem}; did you mean {str(newest)!r}?")
    raise UserError(f"{key} = {str(path)!r}: {problem}", exit_code=NO_CHECKPOINT)
