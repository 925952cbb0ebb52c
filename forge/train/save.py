"""What of a run goes into a checkpoint, and what is told of each save."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from forge.checkpoint import Checkpoints, SaveOutcome
from forge.config import Config, to_toml
from forge.data.tokenizer import Tokenizer
from forge.errors import FAILED, UserError
from forge.observe.events import EventLog
from forge.optim import Optimizer
from forge.parallel.mesh import Meshes
from forge.parallel.model import ParallelModel
from forge.train.resume import all_tensors
from forge.train.state import Progress

log = logging.getLogger(__name__)


class Saver:
    """Saves the whole training state under the current step. All methods but `poll` are collective."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        config: Config,
        meshes: Meshes,
        model: ParallelModel,
        optimizer: Optimizer,
        progress: Progress,
        tokenizer: Tokenizer | None,
        inputs: dict[str, Any],
        events: EventLog | None,
    ):
        self._checkpoints, self._config, self._meshes = checkpoints, config, meshes
        self._model, self._optimizer, self._progress = model, optimizer, progress
        self._inputs, self._events = inputs, events
        self._files = _files(config, tokenizer)
        self.saved_step = -1
        """The step that needs no more saving."""
        self.slowest_s = 0.0
        """What the slowest save so far took until it was on disk, as this rank saw it."""
        self._error: str | None = None

    def save(self) -> None:
        """Start a checkpoint of the current step; returns when the state has been copied.

        Raises UserError (exit 1) on every rank when too many saves in a row, the last of them included, have failed.
        """
        self.wait()
        self.saved_step = self._progress.step
        self._tell(
            self._checkpoints.save(
                self._progress.step,
                all_tensors(self._model, self._optimizer),
                state={
                    "progress": self._progress.state(),
                    "optimizer": self._optimizer.state(),
                    "inputs": self._inputs,
                },
                files=self._files,
                layout=vars(self._meshes.degrees),
            )
        )

    def save_and_wait(self) -> None:
        """Save the current step unless that is done, and see it on disk. Raises UserError (exit 1) if it fails."""
        self.wait()
        if self.saved_step != self._progress.step or self._error is not None:
            self.save()
            self.wait()
        if self._error is not None:
            raise UserError(
                f"the last checkpoint, of step {self._progress.step}, failed: {self._error}", exit_code=FAILED
            )

    def wait(self) -> None:
        """See the end of the save under way, if any. Raises UserError (exit 1) as `save` does."""
        self._tell(self._checkpoints.wait())
        failed, limit = self._checkpoints.failures_in_row, self._config.checkpoint.max_failed_saves
        if limit and failed >= limit:
            raise UserError(
                f"{failed} saves in a row have failed (checkpoint.max_failed_saves = {limit}), the last: {self._error}. "
                f"Make room or mend what it names, then start the run again: it resumes from its last checkpoint.",
                exit_code=FAILED,
            )

    def poll(self) -> None:
        """Tell of saves that ended in the background."""
        self._tell(self._checkpoints.poll())

    def _tell(self, outcomes: list[SaveOutcome]) -> None:
        for outcome in outcomes:
            self._error = outcome.error
            self.slowest_s = max(self.slowest_s, outcome.seconds)
            if outcome.error is None:
                log.info("saved step %d (%.1f s)", outcome.step, outcome.seconds)
            else:
                # All ranks have the same to say: in their files.
                level = logging.INFO if self._events is None else logging.ERROR
                log.log(level, "saving step %d failed: %s", outcome.step, outcome.error)
            if self._events is not None:
                kind = "saved" if outcome.error is None else "save_failed"
                self._events.write(kind, step=outcome.step, seconds=outcome.seconds, error=outcome.error)


def _files(config: Config, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """config.toml and the tokenizer, so that a checkpoint can be used alone."""
    files = {"config.toml": to_toml(config).encode()}
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(Path(folder))
            files |= {f"tokenizer/{file.name}": file.read_bytes() for file in Path(folder).iterdir()}
    return files
