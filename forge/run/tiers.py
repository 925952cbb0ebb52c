"""The start of a run from its checkpoints, node-local states (`checkpoint.local_interval`) and mirror."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
from pathlib import Path

from forge.checkpoint import Checkpoints
from forge.checkpoint.folders import steps
from forge.checkpoint.local import LocalTier
from forge.checkpoint.store import SaveOutcome
from forge.config import Config
from forge.hook import Hook
from forge.observe.report import Reporter
from forge.observe.run_directory import RunDirectory
from forge.run.mirrored import restore_newer
from forge.run.origin import Earlier, new_history_because
from forge.run.resume import Start, find_start, resume_point
from forge.run.rollback import is_abandoned, read_rollbacks
from forge.run.save import Saves
from forge.runtime.causes import Cause
from forge.runtime.distributed import RanksFailed, gather_from_ranks, on_every_rank, on_first_rank
from forge.runtime.errors import NO_CHECKPOINT, UserError
from forge.runtime.files import replace_atomically
from forge.runtime.private import MARKER, PrivateFolder, is_directory
from forge.train.trainer import Trainer

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
_RUN = re.compile(r".+-[0-9a-f]{8}")
_HISTORY = re.compile(r"[0-9a-f]{8}")


class Tiers:
    """The checkpoints of a run and, with `checkpoint.local_interval`, its node-local states. Methods are collective.

    A state belongs to one history, i.e. one sequence of optimizer steps (forge/run/origin.py), of one run. Its path is
    PLACE/RUN/HISTORY/step-N. PLACE is the private folder `checkpoint.local_dir`. RUN is the run's name with a hash of
    its path. HISTORY is a random number, chosen at each start that continues no state. The file `local-states` in the
    run directory records this number and all private folders. A start with another configuration can therefore still
    remove the states.
    """

    def __init__(self, config: Config, checkpoints: Checkpoints, directory: RunDirectory):
        self._config, self._checkpoints, self._directory = config, checkpoints, directory
        self._record = directory.root / "local-states"
        local_dir = config.checkpoint.local_dir
        self._place = Path(local_dir).absolute() if local_dir else MEMORY / f"forge-{os.geteuid()}"
        run = directory.root.resolve()
        self._run = f"{run.name}-{hashlib.sha256(str(run).encode()).hexdigest()[:8]}"
        self.local: LocalTier | None = None
        self._number, self._places = on_first_rank("reading the history's number", self._read_record)
        if config.checkpoint.local_interval and self._number:
            self._open(self._number)

    def find_start(self, earlier: Earlier, reporter: Reporter) -> Start:
        """Find the newest complete checkpoint, on the nodes or on shared storage, and return the run's start from it.

        Collective. Changes no node-local state; `follow` does. Raises UserError like `resume.find_start`.
        """
        replaced = on_first_rank(
            "reading origin.json",
            lambda: new_history_because(self._config, self._directory, earlier),
        )
        start = self._start_from_nodes(reporter) if replaced is None else None
        return start or self._start_from_checkpoints(earlier, replaced, reporter)

    def _start_from_checkpoints(self, earlier: Earlier, replaced: str | None, reporter: Reporter) -> Start:
        """Return a start as `resume.find_start` does.

        After damaged checkpoints, prefer a newer copy in the mirror or on the nodes.

        replaced: why a new history begins; None: it does not.
        """
        checkpoints = self._checkpoints

        def find() -> Start | UserError:
            try:
                return find_start(self._config, checkpoints, self._directory, earlier)
            except UserError as error:
                if error.exit_code != NO_CHECKPOINT:
                    raise
                return error

        start, damaged = find(), checkpoints.fallbacks
        if replaced is None and (damaged or isinstance(start, UserError)):
            if restore_newer(self._config, checkpoints, self._directory, reporter):
                start = find()
                checkpoints.fallbacks = [*damaged, *checkpoints.fallbacks]
            if damaged:
                start = self._start_from_nodes(reporter) or start
        if isinstance(start, UserError):
            raise start
        return start

    def _start_from_nodes(self, reporter: Reporter) -> Start | None:
        """Return a start from a node-local state newer than every checkpoint; None if there is none. Collective."""
        local = self.local
        if local is None:
            return None
        shared = on_first_rank(
            "listing checkpoints", lambda: max(steps(self._checkpoints.folder), default=-1)
        )
        if (step := self._newest(local, shared, reporter)) is None:
            return None
        point = resume_point(
            local.path(step),
            self._config,
            fetch=lambda names: self._fetch(local, step, names, shared, reporter),
            shared=self._checkpoints.folder,
        )
        return Start(point, kept=step)

    def _fetch(self, local: LocalTier, step: int, names: set[str], shared: int, reporter: Reporter) -> None:
        """Fetch like `LocalTier.fetch`. Discard a state that does not fit on a node, so the next start uses an older one.

        Keep the state if there is no checkpoint. shared: step of the newest checkpoint; -1: none.
        """
        try:
            local.fetch(step, names)
        except RanksFailed as error:
            if error.cause is Cause.DISK_FULL and shared >= 0:
                local.forget_after(step - 1)
                _report(f"the local state of step {step} was discarded: {error}", reporter)
            raise

    def _newest(self, local: LocalTier, shared: int, reporter: Reporter) -> int | None:
        known = on_first_rank("reading rollbacks.json", lambda: read_rollbacks(self._directory))
        step = local.newest(after=shared)
        for problem in local.problems:
            _report(problem, reporter)
        if step is None:
            return None
        if is_abandoned(local.path(step), known):
            return None
        nodes = local.nodes
        reporter.event("local_state", step=step, nodes=len(nodes.ranks), newest_checkpoint=shared)
        return step

    def follow(self, start: Start) -> None:
        """Keep the local states of the history that `start` continues, and remove the run's other local states.

        Collective. Call before any other file of the run directory changes: states of a history that is being replaced
        must not be found by the next start.
        """
        point, local = start.point, self.local
        from_nodes = local is not None and point is not None and point.path == local.path(point.step)
        steps = self._config.train.steps if point is None else point.continued(self._config).train.steps
        finished = point is not None and point.step >= steps and not from_nodes
        if not self._config.checkpoint.local_interval or finished:
            if self._number:
                self._remove_states()
                self._write_record(self._places)  # absent nodes may still have states of the old number
            return
        # A start that does not continue a node-local state makes all of them obsolete, also those of absent nodes.
        begins = not from_nodes
        # Nodes may have different paths in checkpoint.local_dir.
        places = gather_from_ranks("comparing checkpoint.local_dir", lambda: str(self._place))
        places = sorted({*self._places, *places})
        if begins:
            self._write_record(places)
            self._open(self._number)
        elif places != self._places:
            self._write_record(places, self._number)
        assert self.local is not None
        self.local.forget_after(start.kept)

    def _read_record(self) -> tuple[str, list[str]]:
        """Read the id of the current history and the folders of its local states from the file `local-states`.

        Call on the first rank. The id is a random string; "" if the file does not exist.
        """
        text = self._record.read_text("utf-8") if self._record.exists() else ""
        number, *places = text.splitlines() or [""]
        return number, places

    def _write_record(self, places: list[str], number: str | None = None) -> None:
        """Write the file `local-states`. number: None: draw a new one. Collective."""

        def write() -> str:
            drawn = number or secrets.token_hex(4)
            replace_atomically(self._record, "\n".join([drawn, *places]).encode())
            return drawn

        self._number, self._places = on_first_rank("recording local states", write), places

    def _remove_states(self) -> None:
        """Remove all local states of this run on every node. Collective."""

        def remove() -> None:
            for place in {*self._places, str(self._place)}:
                if (private := PrivateFolder.existing(Path(place))) is not None:
                    private.remove(re.compile(re.escape(self._run)))

        on_every_rank("removing local states", remove)

    def _open(self, history: str) -> None:
        """Open the local states of `history`, and remove the states of this run's other histories. Collective."""
        folder = self._place / self._run / history

        def make() -> PrivateFolder:
            private = PrivateFolder(self._place, "checkpoint.local_dir", _holds_unmarked_states)
            private.make(self._run, history)
            return private

        private = on_every_rank("making checkpoint.local_dir", make)
        self.local = LocalTier(folder, self._config.checkpoint.peers)
        if self.local.nodes.leads:
            private.remove(_HISTORY, self._run, keep=history)


class LocalSaves(Hook):
    """Saves a node-local state every `checkpoint.local_interval` steps. Called after `Saves`. All methods are collective."""

    def __init__(self, trainer: Trainer, saves: Saves, tiers: Tiers):
        self._trainer, self._saves, self._tiers = trainer, saves, tiers
        self._interval = trainer.config.checkpoint.local_interval

    @property
    def _local(self) -> LocalTier:
        assert self._tiers.local is not None  # opened by `Tiers.follow`
        return self._tiers.local

    def before_run(self, step: int) -> None:
        self._remove_at_end(step)

    def after_step(self, step: int) -> None:
        trainer = self._trainer
        if step % self._interval == 0 and not trainer.finished:
            with trainer.reporter.phases.during("save", step):
                self._saves.prepare(step)
                if not trainer.finished:
                    self._report(self._local.save(step, *self._saves.contents()))
            if trainer.finished:
                # The result of this step asked for a stop, and `Saves` was called before the result was read.
                self._saves.save_step(step, last=True)
        self._remove_at_end(step)
        self._report(self._local.poll())

    def after_rollback(self, step: int) -> None:
        self._report(self._local.forget_after(step))

    def _remove_at_end(self, step: int) -> None:
        if step >= self._trainer.config.train.steps:
            self._report(self._local.end())  # `Saves` has just completed the last checkpoint

    def _report(self, outcomes: list[SaveOutcome]) -> None:
        cause, message = Cause.LOCAL_SAVE_FAILED, "the node-local state of step %d was not saved: %s"
        for outcome in outcomes:
            if outcome.error is not None:
                log.error(message, outcome.step, outcome.error, extra=cause.mark)
                self._trainer.reporter.event(cause, step=outcome.step, error=outcome.error)


def _report(problem: str, reporter: Reporter) -> None:
    """Report a local state that cannot be used."""
    if reporter.world.rank == 0:
        log.warning("%s", problem, extra=Cause.LOCAL_DAMAGED.mark)
    reporter.event(Cause.LOCAL_DAMAGED, problem=problem)


def _holds_unmarked_states(folder: Path) -> bool:
    """Return whether `folder` has only node-local states of an earlier forge version, which wrote no marker files.

    Such a folder contains only folders of runs, and these contain only folders of histories.
    """
    runs = [path for path in folder.iterdir() if path.name != MARKER]
    histories = [path for run in runs if is_directory(run) for path in run.iterdir()]
    return all(_RUN.fullmatch(run.name) and is_directory(run) for run in runs) and all(
        _HISTORY.fullmatch(history.name) and is_directory(history) for history in histories
    )
