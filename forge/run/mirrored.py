"""The mirror of a run's checkpoints in an object store (`checkpoint.mirror`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from forge.checkpoint import Checkpoints, folders
from forge.checkpoint.folders import remove_links, steps
from forge.checkpoint.mirror import Mirror, copied_steps, restore
from forge.config import Config
from forge.hook import Hook
from forge.observe.report import Reporter
from forge.observe.run_directory import RunDirectory
from forge.run.origin import Earlier, new_history_because, origin_of
from forge.run.rollback import is_abandoned, read_rollbacks
from forge.runtime.causes import Cause
from forge.runtime.distributed import gather_from_ranks, on_first_rank
from forge.runtime.errors import NO_CHECKPOINT, UserError
from forge.runtime.files import is_url
from forge.runtime.remote import filesystem_of, join
from forge.train.trainer import Trainer

log = logging.getLogger(__name__)
Result = TypeVar("Result")

# Seconds that a stopped run waits for the mirror.
MIRROR_AT_STOP_S = 20
LOOK_S = 5.0


def mirror_url(config: Config) -> str:
    """Return the URL of this run's mirror. Raises UserError if checkpoint.mirror is not a URL."""
    if not is_url(config.checkpoint.mirror):
        raise UserError(
            f'checkpoint.mirror = "{config.checkpoint.mirror}": is not a URL; allowed: s3://..., gs://..., file:///... and '
            "other URLs that fsspec can write to, or empty for none"
        )
    return join(config.checkpoint.mirror, config.run.name)


def restore_lost(
    config: Config, checkpoints: Checkpoints, directory: RunDirectory, earlier: Earlier, reporter: Reporter
) -> None:
    """If the run directory has no checkpoint, also no damaged one, restore the newest mirrored checkpoint. Collective.

    First remove the links that an earlier process has left.

    Raises UserError like `restore`. Also raises UserError (exit 2) if the run would start over and overwrite the copies of
    its earlier checkpoints.
    """
    folder = checkpoints.folder

    def bring(copied: Callable[[], None]) -> None:
        url = mirror_url(config)
        filesystem_of(url)  # report an invalid URL now, not at the first save
        new_because = new_history_because(config, directory, earlier)
        named = origin_of(config).path
        # A run that goes back to its own checkpoint keeps the copies up to that step.
        goes_back = (
            named is not None and Path(named).is_dir() and Path(named).resolve().parent == folder.resolve()
        )
        # `find_start` handles a folder with a damaged checkpoint.
        if new_because is None and folders.is_empty(folder):
            restore(url, folder, is_abandoned=_left_by_a_rollback(directory), copied=copied)
        elif new_because is not None and not goes_back and (copies := copied_steps(url)):
            raise UserError(
                f"checkpoint.mirror = {url}: has checkpoints {copies} of an earlier run under this name. This run would "
                f"begin a new history ({new_because}) and overwrite them. Use another run.name or another "
                'checkpoint.mirror, or continue the earlier run with checkpoint.resume = "auto"'
            )

    on_first_rank("removing links", lambda: remove_links(folder))
    if config.checkpoint.mirror:
        _watched(bring, reporter)


def _watched(bring: Callable[[Callable[[], None]], Result], reporter: Reporter) -> Result:
    """Return the result of `bring` on the first rank. Collective.

    bring: called with a function that counts a restored file. Each file renews the watchdog's limit on every rank, because a
    large checkpoint may take hours.
    """
    purpose, renewed = "restoring the mirror", 0
    files: list[None] = []  # an entry for each restored file: several threads append
    restoring: Future[Result] = Future()

    def work() -> None:
        try:
            restoring.set_result(bring(lambda: files.append(None)))
        except BaseException as error:
            restoring.set_exception(error)

    def look() -> tuple[bool, int]:
        wait([restoring], LOOK_S)
        return restoring.done(), len(files)

    if reporter.world.rank == 0:
        threading.Thread(target=work, name="forge-restore", daemon=True).start()
    complete = False
    while not complete:
        complete, copied = on_first_rank(purpose, look)
        if copied > renewed:
            renewed = copied
            reporter.phases.renew()
    return on_first_rank(purpose, restoring.result)


def _left_by_a_rollback(directory: RunDirectory) -> Callable[[Path], bool]:
    """Return `is_abandoned` for the roll-backs of the run in `directory`."""
    return lambda checkpoint: is_abandoned(checkpoint, read_rollbacks(directory))


def restore_newer(
    config: Config, checkpoints: Checkpoints, directory: RunDirectory, reporter: Reporter
) -> bool:
    """Restore the newest mirrored checkpoint that is newer than every checkpoint in the run directory. Collective.

    Return whether there was one. Without this, the mirror would forget the copies of damaged checkpoints.
    """

    def bring(copied: Callable[[], None]) -> bool:
        folder = checkpoints.folder
        newest = max(steps(folder), default=-1)
        try:
            step = restore(mirror_url(config), folder, newest, _left_by_a_rollback(directory), copied)
        except UserError as error:
            if newest < 0 and error.exit_code != NO_CHECKPOINT:
                raise  # there is no other checkpoint, so wait for the store
            if newest >= 0:
                log.warning("%s; using step %d", error, newest, extra=Cause.MIRROR_FAILED.mark)
            return False
        return step is not None

    return bool(config.checkpoint.mirror) and _watched(bring, reporter)


def finish_mirror(
    config: Config, checkpoints: Checkpoints, step: int, reporter: Reporter, is_stopping: Callable[[], bool]
) -> None:
    """Copy the last checkpoint of a finished run to the mirror if its copy is missing. Collective."""
    mirror: list[Mirror] = []

    def copy() -> None:
        mirror.append(_mirror(config, checkpoints))
        _copy_newest(mirror[0], checkpoints, step)

    if config.checkpoint.mirror:
        on_first_rank("copying to the mirror", copy)
        wait_for_mirror(mirror, reporter, config.resilience.setup_timeout_s, is_stopping)


def wait_for_mirror(
    mirrors: Iterable[Mirror],
    reporter: Reporter,
    bound_s: float,
    is_stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until the mirror of the first rank has made all its copies. Collective.

    Give up shortly before the watchdog would, and after a request to stop; the next start then makes the copy. mirrors: the
    mirror on the first rank, empty on the others. bound_s: the watchdog's limit of the phase; 0: none. On every rank, it
    counts from the last copied file. is_stopping: whether this rank has a request to stop.
    """
    mirror, copied, since = next(iter(mirrors), None), -1, time.monotonic()
    stops = False

    def look() -> tuple[bool, int]:
        assert mirror is not None
        complete = mirror.wait(LOOK_S)
        late = bound_s and time.monotonic() - since > 0.8 * bound_s
        if not complete and (late or stops):
            mirror.close(0 if late else MIRROR_AT_STOP_S)
            complete = True
        return complete, mirror.files

    complete = False
    while not complete:
        stops = any(gather_from_ranks("sharing requests to stop", is_stopping))
        complete, files = on_first_rank("copying to the mirror", look)
        if files > copied:
            copied, since = files, time.monotonic()
            reporter.phases.renew()


def _mirror(config: Config, checkpoints: Checkpoints) -> Mirror:
    kept = config.checkpoint
    return Mirror(mirror_url(config), checkpoints.folder, kept.keep_last, kept.keep_every)


def _copy_newest(mirror: Mirror, checkpoints: Checkpoints, step: int) -> None:
    """Copy the run's newest checkpoint up to `step`, if any, unless it has a copy: a killed run may not have copied it."""
    saved = [one for one in steps(checkpoints.folder) if one <= step]
    if saved:
        mirror.copy(max(saved), if_missing=True)


class MirrorSaves(Hook):
    """Copies each complete checkpoint to the mirror. Exists only on the first rank."""

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints):
        self._trainer, self._checkpoints = trainer, checkpoints
        self.mirror = _mirror(trainer.config, checkpoints)

    def before_run(self, step: int) -> None:
        self._return_to(step)

    def after_save(self, step: int) -> None:
        self.mirror.copy(step)

    def after_rollback(self, step: int) -> None:
        self._return_to(step)

    def _return_to(self, step: int) -> None:
        self.mirror.forget_after(step)
        _copy_newest(self.mirror, self._checkpoints, step)

    def after_run(self) -> None:
        # A stopped run must end before its time limit. A finished run waits (`wait_for_mirror`).
        if self._trainer.progress.step < self._trainer.config.train.steps:
            self.mirror.close(MIRROR_AT_STOP_S)
