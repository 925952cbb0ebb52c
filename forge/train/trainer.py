"""Training on any layout: `Trainer.step` is the algorithm, `Trainer.train` the loop around it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from forge import compat
from forge.checkpoint import Checkpoints
from forge.config import Config, Degrees, Phases, StepPlan
from forge.data.build import Data
from forge.data.loader import Batch, Loader
from forge.errors import RollbackRequired
from forge.hook import Hook, Hooks, StepInfo
from forge.model import flops_per_token
from forge.observe.collector import Collector
from forge.observe.metrics import MetricsWriter
from forge.observe.report import Reporter
from forge.optim import planned_rate
from forge.parallel.build import build_meta_model, build_parallel_model
from forge.parallel.gradients import GradientReport, clip_gradients, report_gradients
from forge.parallel.mesh import make_meshes
from forge.parallel.model import Sums
from forge.resilience.spikes import SpikeWindow
from forge.resilience.stopping import StopSignals
from forge.resilience.watchdog import patience
from forge.train.anomalies import AnomalyPolicy
from forge.train.model_summary import summarize
from forge.train.optimizers import load_training_state, make_optimizer
from forge.train.origin import write_origin
from forge.train.results import StepResults
from forge.train.resume import Start, load_weights
from forge.train.rollback import find_rollback_point, sync_rollback_history
from forge.train.state import Progress, Rollback

log = logging.getLogger(__name__)


class Trainer:
    """A model in training on the joined ranks. All methods but `request_stop` and `is_due` are collective.

    Constructing it builds everything and loads what the run starts from: the checkpoint of `start`; without one fresh
    weights, or those of `checkpoint.init`.
    """

    def __init__(
        self,
        config: Config,
        degrees: Degrees,
        data: Data,
        checkpoints: Checkpoints,
        start: Start,
        reporter: Reporter,
        signals: StopSignals,
    ):
        self.config, self.data, self.checkpoints = config, data, checkpoints
        self.reporter, self.signals, self.device = reporter, signals, reporter.world.device

        self.meshes = make_meshes(degrees, self.device.type, offloaded=config.parallel.cpu_offload)
        compat.raise_timeouts(patience(config.resilience))
        self.model = build_parallel_model(config, self.meshes, self.device)
        compat.raise_timeouts(patience(config.resilience))  # of groups that engines have made

        if start.point is None and config.checkpoint.init:
            # Before the optimizer, whose mean of the weights begins at them.
            load_weights(Path(config.checkpoint.init), self.model)
            log.info("weights from %s, a new history", config.checkpoint.init)
        self.optimizer = make_optimizer(config, self.model, self.meshes)
        reporter.memory.count_state(self.model.memory(), self.optimizer.tensors())
        # What was built is counted, which for a class of the user's own need not be what [model] says.
        whole = build_meta_model(config)
        summarize(self.model, whole, config, degrees, reporter.memory)

        spikes = SpikeWindow(config.resilience.spike_window, config.resilience.spike_threshold)
        self.phases = Phases(config)
        self.progress = Progress(data.dataset.order, spikes=spikes)
        self.anomalies = AnomalyPolicy(
            config.resilience, self.model, self.progress, self.device, self.compute_gradients, reporter.event
        )
        self.collector = Collector(config.train.gc_interval)
        flops = flops_per_token(whole, config.train.seq_len)
        self.metrics = MetricsWriter(
            config, reporter.world, reporter.directory, flops, self.collector, reporter.running
        )
        self.results = StepResults(self.device, with_routers=self.metrics.wants_routers)
        self.wants_save = False
        """Whether this rank asks for a checkpoint; all ranks learn of it with the norm of the next gradient."""
        self.hooks = Hooks()

        self.batches = self.restart_from(start)

    def train(self, hooks: Sequence[Hook]) -> str | None:
        """Train until `train.steps`, with these hooks; None if it got there, else why it stopped before.

        Raises UserError (exit 1) when too much goes wrong, with what is known of it.
        """
        self.hooks = Hooks(hooks)
        with self.hooks.around_run(self.progress.step):
            try:
                while not self.finished:
                    try:
                        with self.hooks.around("step", self.progress.step + 1):
                            self.step()
                    except RollbackRequired as required:
                        self.roll_back(required)
                self.reporter.phases.enter("end")
            finally:
                self.batches.close()
        if self.progress.step >= self.config.train.steps:
            return None
        return self.signals.reason or "another rank was asked to stop"

    def step(self) -> None:
        """One optimizer step. The host waits for the device to finish the step before, never for the one it launches."""
        config, step, plan = self.config, self.progress.step + 1, self.plan
        lr = planned_rate(config, self.phases, step, self.progress.tokens)
        with self.hooks.around("data", step):
            batch = next(self.batches)
        with self.hooks.around("gradients", step):
            sums, report = self.compute_gradients(batch)
            # The result of the step before is known by now, and is acted on before the next update.
            if self.process_last_result():
                sums, report = self.compute_gradients(batch)
        report = self.anomalies.examine(step, batch, sums, report)
        clip_gradients(self.model.shards, report.norm, config.train.grad_clip_norm, self.optimizer)
        with self.hooks.around("optimizer", step):
            self.optimizer.step(lr, report.skip)
        self.model.after_update()
        routers = self.model.update_router(report.skip)
        self.model.zero_gradients()
        self.progress.advance(plan)
        self.results.push(
            StepInfo(step, self.progress.tokens, lr, self.progress.next_sample), sums, report, routers
        )

    def compute_gradients(self, batch: Batch) -> tuple[Sums, GradientReport]:
        """Leave the gradient of the whole global batch in the shards; return the loss and the gradient's norm."""
        tokens = self.model.count_tokens(batch)
        sums = self.model.forward_backward(batch, tokens)
        self.model.finalize_gradients()
        stop = self.signals.reason is not None
        report = report_gradients(self.model.shards, sums.objective, stop=stop, save=self.wants_save)
        return sums, report

    def process_last_result(self) -> bool:
        """Wait for the result of the last step and act on it, unless that is done. Call before evaluating or saving a state.

        True if gradients computed since were discarded and have to be computed again. Raises RollbackRequired.
        """
        result = self.results.pop()
        if result is None:
            return False
        self.hooks.call("after_result", result)
        return self.anomalies.process_result(result)

    @property
    def plan(self) -> StepPlan:
        """What the next step has."""
        return self.phases.at(self.progress.tokens)

    @property
    def finished(self) -> bool:
        """Whether the last step has been made, or a rank has asked to stop."""
        return self.progress.step >= self.config.train.steps or self.results.stop_requested

    def is_due(self, interval: int) -> bool:
        """Whether what is done every `interval` steps (0: never), and after the last one, is due after this step."""
        step = self.progress.step
        return interval > 0 and (step % interval == 0 or step == self.config.train.steps)

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to end the run; they learn of it with the norm of the next gradient."""
        self.signals.reason = self.signals.reason or reason

    def roll_back(self, required: RollbackRequired) -> None:
        """Return to the newest good checkpoint from before the trouble. Raises UserError (exit 1) if that is not possible."""
        progress, report_event = self.progress, self.reporter.event
        assert required.last_step == progress.step
        self.reporter.phases.enter("set-up", progress.step)
        point = find_rollback_point(
            required, progress, self.checkpoints, self.config, self.reporter.directory, report_event
        )
        rollback = progress.rollback_to(point.state, required.pass_over)
        first, end = rollback.first_sample, rollback.end_sample
        over = f", passing over samples {first} to {end - 1}" if required.pass_over else ""
        log.warning("%s. Back to step %d%s", required, point.step, over)
        numbers = {name: value for name, value in vars(rollback).items() if name != "drawn"}
        report_event("rolled_back", reason=str(required), **numbers)
        self.anomalies.discard_gradients()
        self.results.clear()
        self.batches.close()
        self.batches = self.restart_from(Start(point, kept=point.step), [rollback])
        self.hooks.call("after_rollback", point.step)

    def restart_from(self, start: Start, rollbacks: Sequence[Rollback] = ()) -> Loader:
        """Restore the state at `start` and open the data there.

        Used by a resume and by a roll-back, which adds itself to `rollbacks`. What lies behind `start`, and what the run
        directory holds of another history, is removed.
        """
        if start.point is not None:
            if not load_training_state(start.point, self.model, self.optimizer, self.config.optimizer.name):
                self.optimizer = make_optimizer(self.config, self.model, self.meshes)
            self.progress.load(start.point.state)
        # In this order: a run that is killed in between meets the same trouble again, or knows that it has rolled back; and
        # a new history is recorded when nothing of the old one is left, before it saves for the first time.
        directory = self.reporter.directory
        names = self.checkpoints.set_aside_after(start.kept)
        sync_rollback_history(directory, start, self.progress, rollbacks)
        metrics = self.metrics.restart_from(start.kept, aside=start.replaces)
        if names or metrics:
            self.reporter.event("set_aside", checkpoints=names, metrics=metrics and metrics.name)
        write_origin(directory, start.origin)
        return self.make_loader()

    def make_loader(self) -> Loader:
        """The batches of this data rank from `progress` on, where the mixture of the config comes into force."""
        dataset, progress = self.data.dataset, self.progress
        progress.order = dataset.continuing(progress.order, progress.next_sample, self.plan.weights)
        return Loader(
            dataset.following(progress.order),
            global_batch_size=self.config.train.global_batch_size,
            rank=self.meshes.data_rank,
            ranks=self.meshes.data_ranks,
            start_sample=progress.next_sample,
            device=self.device,
            prefetch=self.config.data.prefetch,
            plan_at=self.phases.at,
            tokens=progress.tokens,
        )
