"""States that the nodes keep themselves (`checkpoint.local_interval`): when they are made, and when a start uses one."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
from pathlib import Path

from forge.checkpoint import Checkpoints
from forge.checkpoint.folders import steps
from forge.checkpoint.local import LocalTier
from forge.config import Config
from forge.distributed import on_every_rank, on_first_rank
from forge.errors import UserError
from forge.files import replace_atomically
from forge.hook import Hook
from forge.observe.report import Reporter
from forge.observe.run_directory import RunDirectory
from forge.train.origin import Earlier, new_history_because
from forge.train.resume import Start, find_start, resume_point
from forge.train.rollback import read_rollbacks
from forge.train.save import Saves
from forge.train.trainer import Trainer

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")


class Tiers:
    """The checkpoints of a run and, with `checkpoint.local_interval`, the states on its nodes. Collective.

    States belong to one history of one run: their folder is named after the run directory and after a number drawn when
    the history begins, which the run directory keeps.
    """

    def __init__(self, config: Config, checkpoints: Checkpoints, directory: RunDirectory):
        self._config, self._checkpoints, self._directory = config, checkpoints, directory
        self._record = directory.root / "local-states"
        self.local: LocalTier | None = None
        self._open(on_first_rank("reading the history's number", self._history))

    def find_start(self, earlier: Earlier, reporter: Reporter) -> Start:
        """Return where the run starts: at the newest state that is whole, of the nodes or else of the shared storage.

        Raises UserError as `resume.find_start` does.
        """
        config, checkpoints, directory = self._config, self._checkpoints, self._directory
        start = None
        if self.local is not None and config.checkpoint.local_interval:
            replaced, shared = on_first_rank(
                "listing checkpoints",
                lambda: (
                    new_history_because(config, directory, earlier.finished),
                    max(steps(checkpoints.folder), default=-1),
                ),
            )
            if replaced is None and (step := self._newest(self.local, shared, reporter)) is not None:
                local = self.local
                point = resume_point(local.path(step), config, fetch=lambda names: local.fetch(step, names))
                start = Start(point, kept=step)
        start = start or find_start(config, checkpoints, directory, earlier)
        self._follow(start)
        return start

    def _newest(self, local: LocalTier, shared: int, reporter: Reporter) -> int | None:
        known = len(on_first_rank("reading rollbacks.json", lambda: read_rollbacks(self._directory)))
        step = local.newest(after=shared)
        for problem in local.problems:
            if reporter.world.rank == 0:
                log.warning("%s", problem)
            reporter.event("local_damaged", problem=problem)
        if step is None:
            return None
        state = json.loads((local.path(step) / "trainer.json").read_text("utf-8"))
        if len(state["progress"]["rollbacks"]) < known:
            return None  # of before a roll-back
        nodes = local.nodes
        reporter.event("local_state", step=step, nodes=len(nodes.ranks), newest_checkpoint=shared)
        return step

    def _follow(self, start: Start) -> None:
        """Keep what belongs to the history that goes on from `start`, and nothing else."""
        if not self._config.checkpoint.local_interval:
            return
        begins = start.point is None or start.kept < 0 or start.replaces
        if begins or self.local is None:
            number = secrets.token_hex(4)
            self._open(on_first_rank("beginning local states", lambda: self._begin(number)))
        assert self.local is not None
        self.local.forget_after(start.kept)

    def _history(self) -> str:
        """On the first rank: the number of the history in the run directory; empty if it has none."""
        return self._record.read_text().strip() if self._record.exists() else ""

    def _begin(self, number: str) -> str:
        replace_atomically(self._record, number.encode())
        return number

    def _open(self, history: str) -> None:
        """Open the states of `history` on all nodes; remove those of others of this run."""
        kept = self._config.checkpoint
        if not kept.local_interval or not history:
            return
        run = self._directory.root.resolve()
        name = f"{run.name}-{hashlib.sha256(str(run).encode()).hexdigest()[:8]}"
        top = (Path(kept.local_dir) if kept.local_dir else MEMORY / f"forge-{os.getuid()}") / name
        on_every_rank("making checkpoint.local_dir", lambda: _make(top / history, kept.local_dir))
        self.local = LocalTier(top / history, kept.peers)
        if self.local.nodes.leads:
            for other in top.iterdir():
                if other.name != history:
                    shutil.rmtree(other, ignore_errors=True)


class LocalSaves(Hook):
    """Keeps a state on the nodes every `checkpoint.local_interval` steps. Comes after `Saves`. All methods are collective."""

    def __init__(self, trainer: Trainer, saves: Saves, local: LocalTier):
        self._trainer, self._saves, self._local = trainer, saves, local
        self._interval = trainer.config.checkpoint.local_interval

    def after_step(self, step: int) -> None:
        trainer = self._trainer
        if step % self._interval == 0 and not trainer.finished:
            with trainer.reporter.phases.during("save", step):
                self._saves.prepare(step)
                self._local.save(step, *self._saves.contents())
        if step >= trainer.config.train.steps:
            self._local.forget_after(-1)  # `Saves` has just seen the last checkpoint on disk
        self._report()

    def after_rollback(self, step: int) -> None:
        self._local.forget_after(step)
        self._report()

    def _report(self) -> None:
        for outcome in self._local.poll():
            if outcome.error is not None:
                log.error("keeping step %d on the nodes failed: %s", outcome.step, outcome.error)
                self._trainer.reporter.event("local_save_failed", step=outcome.step, error=outcome.error)


def _make(folder: Path, key: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(bytes(4096))
        probe.unlink()
    except OSError as error:
        raise UserError(
            f'checkpoint.local_dir = "{key}": {folder} cannot be written to ({error.strerror}); name a folder in memory or '
            "on a disk of each node, or set checkpoint.local_interval = 0"
        ) from error
