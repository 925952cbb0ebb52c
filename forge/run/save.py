"""`Saves`: decides when to save a checkpoint, collects its contents, and reports each save."""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path
from typing import Any

from forge.checkpoint import Checkpoints, NamedTensors, SaveOutcome
from forge.config import Config, to_toml
from forge.data.tokenizer import Tokenizer
from forge.hook import Hook
from forge.runtime.causes import Cause
from forge.runtime.errors import FAILED, UserError
from forge.train.state import all_tensors, replicated_tensors
from forge.train.trainer import Trainer

log = logging.getLogger(__name__)


class Saves(Hook):
    """Saves a checkpoint every `checkpoint.interval` steps or `interval_minutes`, and at the end. Methods are collective."""

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints):
        self._checkpoints = checkpoints
        self._trainer, self._config = trainer, trainer.config.checkpoint
        self._files = _files(trainer.config, trainer.data.tokenizer)
        self._saved_step = -1  # the last saved step
        self._error: str | None = None
        self._cause = Cause.SAVE_FAILED
        self._saved_at = time.monotonic()  # start of the last save, or of the run
        self.slowest_s = 0.0
        """Duration in seconds of the slowest save so far on this rank, until the checkpoint was on disk."""

    def before_run(self, step: int) -> None:
        """Save a run that starts from a node-local state of its last step, because no step follows. Collective."""
        if step >= self._trainer.config.train.steps:
            self.save_step(step, last=True)

    def before_gradients(self, step: int) -> None:
        """Request a save when `interval_minutes` have passed on the first rank's clock.

        All ranks save after the same step.
        """
        if self._config.interval is None and self._trainer.reporter.world.rank == 0:
            seconds = 60 * self._config.interval_minutes
            if 0 < seconds <= time.monotonic() - self._saved_at:
                self._trainer.request_save()

    def after_step(self, step: int) -> None:
        """Save if a save is due. After the last step, save and wait for the end of the save. Collective."""
        trainer, interval = self._trainer, self._config.interval
        due = trainer.results.save_requested or (interval is not None and trainer.is_due(interval))
        if due and step < trainer.config.train.steps:
            self.save_step(step, last=False)
        self._report(self._checkpoints.poll())
        if self._trainer.finished:
            self.save_step(step, last=True)

    def after_rollback(self, step: int) -> None:
        self._saved_step = step
        # A save in flight may have completed, but the roll-back has set its checkpoint aside.
        self._report([one for one in self._checkpoints.wait() if one.step <= step or one.error is not None])

    def prepare(self, step: int) -> None:
        """Prepare a save of `step`: process its result, let hooks flush their files, and compare replicas. Collective.

        Raises RollbackRequired if the state is known to be bad.
        """
        trainer = self._trainer
        trainer.process_last_result()
        trainer.hooks.call("before_save", step)
        trainer.anomalies.check_replicas(step, replicated_tensors(trainer.model, trainer.optimizer))

    def save_step(self, step: int, last: bool) -> None:
        """Save `step`. last: the process ends with this step, so wait until the checkpoint is on disk. Collective."""
        trainer = self._trainer
        with trainer.reporter.phases.during("save", step):
            self._saved_at = time.monotonic()
            self.prepare(step)
            # Before the manifest is written, so a checkpoint on disk never lacks the metrics of earlier steps.
            trainer.metrics.sync()
            trainer.reporter.sync_events()
            trainer.results.clear_save_request()
            if last:
                self.save_and_wait()
            else:
                self.save()

    def save(self) -> None:
        """Start a checkpoint of the current step. Return once the state has been copied. Collective.

        Raises UserError (exit 1) on every rank after checkpoint.max_failed_saves failed saves in a row.
        """
        self._wait()
        trainer = self._trainer
        self._saved_step = trainer.progress.step
        self._report(self._checkpoints.save(self._saved_step, *self.contents()))

    def contents(self) -> tuple[NamedTensors, dict[str, Any], dict[str, bytes], dict[str, Any]]:
        """Return the contents of a checkpoint of the current step: all arguments of `Checkpoints.save` except `step`."""
        trainer = self._trainer
        state = {
            "progress": trainer.progress.state(),
            "optimizer": trainer.optimizer.state(),
            "optimizer_name": trainer.config.optimizer.name,
            "inputs": trainer.data.fingerprints,
            "hooks": trainer.hooks.state(),
        }
        tensors, layout = all_tensors(trainer.model, trainer.optimizer), vars(trainer.meshes.degrees)
        return tensors, state, self._files, layout

    def save_and_wait(self) -> None:
        """Save the current step, unless it is already saved. Wait until the checkpoint is on disk. Collective.

        Raises UserError (exit 1) if the save fails.
        """
        self._wait()
        step = self._trainer.progress.step
        if self._saved_step != step or self._error is not None:
            self.save()
            self._wait()
        if self._error is not None:
            message = f"saving the last checkpoint (step {step}) failed: {self._error}"
            raise UserError(message, FAILED, self._cause)

    def _wait(self) -> None:
        """Wait for the save in flight, if any. Raises UserError (exit 1) like `save`."""
        self._report(self._checkpoints.wait())
        failed, limit = self._checkpoints.failures_in_row, self._config.max_failed_saves
        if limit and failed >= limit:
            raise UserError(
                f"{failed} saves in a row have failed (checkpoint.max_failed_saves = {limit}), the last: {self._error}. "
                f"Free space or fix this error, then start the run again: it resumes from its last checkpoint.",
                FAILED,
                self._cause,
            )

    def _report(self, outcomes: list[SaveOutcome]) -> None:
        reporter = self._trainer.reporter
        for outcome in outcomes:
            self._error, self._cause = outcome.error, outcome.cause
            self.slowest_s = max(self.slowest_s, outcome.seconds)
            if outcome.error is None:
                log.info("saved step %d (%.1f s)", outcome.step, outcome.seconds)
                self._trainer.hooks.call("after_save", outcome.step)
            else:
                # All ranks know the outcome. Rank 0's message goes to the terminal, the messages of other ranks to
                # their log files.
                level = logging.ERROR if reporter.world.rank == 0 else logging.INFO
                message = "saving step %d failed: %s"
                log.log(level, message, outcome.step, outcome.error, extra=outcome.cause.mark)
            fields = {"step": outcome.step, "seconds": outcome.seconds, "error": outcome.error}
            if outcome.error is None:
                reporter.event("saved", **fields)
            else:
                reporter.event(Cause.SAVE_FAILED, cause=outcome.cause, **fields)


def _files(config: Config, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Return the files that make a checkpoint self-contained (config.toml, tokenizer), as relative path -> content."""
    files = {"config.toml": to_toml(config).encode()}
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(Path(folder))
            files |= {f"tokenizer/{file.name}": file.read_bytes() for file in Path(folder).iterdir()}
    return files
