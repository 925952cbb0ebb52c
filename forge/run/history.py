"""Load checkpoints into the trainer: once at the start of a run, and again at each roll-back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from forge.checkpoint import Checkpoints
from forge.run.origin import write_origin
from forge.run.restore import load_training_state, load_weights
from forge.run.resume import Start
from forge.run.rollback import (
    find_rollback_point,
    merged_rollbacks,
    recorded_origin,
    write_rollbacks,
)
from forge.runtime.causes import Cause
from forge.runtime.distributed import on_first_rank
from forge.runtime.errors import RollbackRequired
from forge.train.state import Rollback
from forge.train.trainer import Trainer

log = logging.getLogger(__name__)


class History:
    """Loads checkpoints into a trainer and returns the run directory to the same step. All methods are collective."""

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints):
        self._trainer, self._checkpoints = trainer, checkpoints

    def load(self, start: Start) -> None:
        """Load the state of `start` into the trainer, and open the data. Change no file. Collective.

        The state is a checkpoint, the weights of `checkpoint.init`, or nothing (initial weights).
        """
        trainer, init = self._trainer, self._trainer.config.checkpoint.init
        if start.point is None and init:
            load_weights(Path(init), trainer.model)
            trainer.renew_optimizer()  # the new optimizer's weight average starts from the loaded weights
            log.info("starting at step 0 with the weights of %s", init)
        self._load(start)

    def begin(self, start: Start) -> None:
        """Set aside all checkpoints and metrics that do not belong to the history of `start`. Collective.

        Call after `load`. If the run starts over, all old checkpoints and metrics are set aside.
        """
        trainer, reporter = self._trainer, self._trainer.reporter
        # The order matters. If the run is killed in between, the next start either meets the same fault again or reads
        # the record of the roll-back. A new history is recorded after the old one is set aside, and before the new
        # history's first save.
        # A run that does not continue from a checkpoint in its folder sets aside damaged ones too: they would refuse the
        # next start. A node-local state may be lost, and the next start then must not begin at step 0.
        point, own = start.point, False
        if point is not None:
            in_folder = self._checkpoints.path(point.step)
            own = point.fetch is not None or point.path.resolve() == in_folder.resolve()
        names = self._checkpoints.set_aside_after(start.kept, damaged=not own)
        write_rollbacks(reporter.directory, trainer.progress)
        rolled_back = len(trainer.progress.rollbacks)
        origin = start.origin or on_first_rank(
            "reading origin.json", lambda: recorded_origin(reporter.directory)
        )
        first, inputs = origin.step if origin else 0, trainer.data.fingerprints
        metrics = trainer.metrics.restart_from(start.kept, rolled_back, inputs, first, aside=start.replaces)
        if names or metrics:
            aside = metrics and metrics.name
            reporter.event(Cause.SET_ASIDE, checkpoints=names, metrics=aside, kept=start.kept)
        write_origin(reporter.directory, start.origin)

    def roll_back(self, required: RollbackRequired) -> None:
        """Roll back to the newest good checkpoint before the first bad step. Collective.

        Raises UserError (exit 1) if there is no such checkpoint, or after too many roll-backs.
        """
        trainer = self._trainer
        progress, reporter = trainer.progress, trainer.reporter
        assert required.last_step == progress.step
        reporter.phases.enter("set-up", progress.step)
        point = find_rollback_point(
            required, progress, self._checkpoints, trainer.config, reporter.directory, reporter.event
        )
        rollback = progress.rollback_to(point.state, required.pass_over)
        first, end = rollback.first_sample, rollback.end_sample
        over = f", skipping samples {first} to {end - 1}" if required.pass_over else ""
        log.warning("%s. Rolling back to step %d%s", required, point.step, over, extra=required.cause.mark)
        numbers = {name: value for name, value in vars(rollback).items() if name != "drawn"}
        reporter.event("rolled_back", cause=required.cause, reason=str(required), **numbers)
        trainer.anomalies.discard_gradients()
        trainer.results.clear()
        trainer.batches.close()
        start = Start(point, kept=point.step)
        self._load(start, [rollback])
        trainer.model.discard_fingerprints()
        self.begin(start)
        trainer.hooks.load_state(point.state.get("hooks", {}), rolls_back=True)
        trainer.hooks.call("after_rollback", point.step)

    def _load(self, start: Start, rollbacks: Sequence[Rollback] = ()) -> None:
        """Load the checkpoint of `start`, and open the data at its step. rollbacks: new roll-backs. Collective."""
        trainer = self._trainer
        if start.point is not None:
            name = trainer.config.optimizer.name
            if not load_training_state(start.point, trainer.model, trainer.optimizer, name):
                trainer.renew_optimizer()
            trainer.progress.load(start.point.state)
            if start.point.state["inputs"] != trainer.data.fingerprints:
                trainer.progress.spikes.clear()  # other data have another loss
            trainer.count_steps()
        progress, directory = trainer.progress, trainer.reporter.directory
        progress.pass_over(merged_rollbacks(directory, start, progress, rollbacks))
        trainer.open_data()
