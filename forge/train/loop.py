"""The training loop: batch, gradient, verdict, update; then evaluation, a sample and a checkpoint where they are due."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from forge.config import Config
from forge.data.loader import Batch, Loader
from forge.data.sources import Source
from forge.data.tokenizer import Tokenizer
from forge.distributed import on_every_rank
from forge.errors import UserError
from forge.fault import fault_point
from forge.observe.collector import Collector
from forge.optim import Optimizer, learning_rate
from forge.parallel.gradients import GradientReport, clip_gradients, report_gradients
from forge.parallel.mesh import Meshes
from forge.parallel.model import ParallelModel, Sums
from forge.resilience.signals import StopSignals
from forge.resilience.stragglers import Stragglers
from forge.resilience.time_limit import TimeLimit
from forge.train.evaluate import evaluate, write_sample
from forge.train.judge import Judge, Setback
from forge.train.recorder import Recorder, StepFacts
from forge.train.resume import Origin, all_copies, load_origin
from forge.train.save import Saver
from forge.train.state import Progress, Rollback
from forge.train.watch import Phases, Watcher

log = logging.getLogger(__name__)


@dataclass
class Training:
    """Everything that the loop works with. `read_on` opens the data where `progress` stands. `sampling_group`: all ranks,
    in a group that the model does not use."""

    config: Config
    meshes: Meshes
    device: torch.device
    model: ParallelModel
    optimizer: Optimizer
    progress: Progress
    batches: Loader
    read_on: Callable[[], Loader]
    validation: dict[str, Source]
    tokenizer: Tokenizer | None
    recorder: Recorder
    saver: Saver
    judge: Judge
    roll_back: Callable[[Training, Setback], None]
    signals: StopSignals
    time_limit: TimeLimit
    stragglers: Stragglers
    phases: Phases
    collector: Collector
    sampling_group: dist.ProcessGroup | None
    watchers: list[Watcher]

    def run(self) -> str | None:
        """Train until `train.steps`; None if it got there, else why it stopped. Saves at the end either way.

        Raises UserError (exit 1) when too much goes wrong, with what is known of it.
        """
        while not self._over:
            try:
                for watcher in self.watchers:
                    watcher.before_step(self.progress.step + 1)
                self.step()
                for watcher in self.watchers:
                    watcher.after_step(self.progress.step)
                self.after_step()
                if self._over:
                    self._save(final=True)
            except Setback as setback:
                self.roll_back(self, setback)
        self.phases.enter("end")
        if self.progress.step >= self.config.train.steps:
            return None
        return self._wish_to_stop() or "another rank was asked to stop"

    @property
    def _over(self) -> bool:
        return self.progress.step >= self.config.train.steps or self.recorder.stop_asked

    def step(self) -> None:
        """One optimizer step. It waits for the device to end the step before, never for the one it launches."""
        began = time.perf_counter()
        step = self.progress.step + 1
        self.stragglers.begin_step()
        self.phases.enter("data", step)
        batch = next(self.batches)
        self.phases.enter("step", step)
        fault_point("step", step)
        config = self.config
        lr = learning_rate(config.schedule, lr=config.optimizer.lr, step=step, steps=config.train.steps)

        sums, report = self.gradients(batch)
        # What the step before came to is known by now, and must be judged before the next update.
        if self.judge.settle(self.recorder.read(), self.gradients):
            sums, report = self.gradients(batch)
        limits, report = self.judge.with_spikes(step, sums, report)
        clip_gradients(self.model.shards, report.norm, config.train.grad_clip_norm)
        with self.stragglers.optimizer():
            self.optimizer.step(lr, report.skip)
        self.model.after_update()
        routers = self.model.update_router(report.skip)
        self.model.zero_gradients()

        self.judge.keep(batch)
        self.progress.advance(config)
        self.recorder.record(StepFacts(step, self.progress.tokens, lr, limits), sums, report, routers)
        took = time.perf_counter() - began
        self.stragglers.end_step(step, took, self.batches.wait_s)
        self.recorder.add_time(took, self.batches.wait_s, self.collector.take_seconds())

    def gradients(self, batch: Batch) -> tuple[Sums, GradientReport]:
        """The gradient of the whole global batch, left in the shards, and what is to be known of it."""
        tokens = self.model.count_tokens(batch)
        sums = self.model.forward_backward(batch, tokens)
        self.model.finalize_gradients()
        report = report_gradients(self.model.shards, sums.objective, stop=self._wish_to_stop() is not None)
        return sums, report

    def _wish_to_stop(self) -> str | None:
        """Why this rank would end the run; the others learn of it with the gradient's norm."""
        if self.signals.reason is None and self.time_limit.near(self.saver.slowest_s):
            return f"resilience.time_limit_s = {self.config.resilience.time_limit_s:g} is near"
        return self.signals.reason

    def after_step(self) -> None:
        """Evaluate, sample, save and collect garbage where due, in this order: a checkpoint follows all lines of its step."""
        step, config = self.progress.step, self.config
        last = step == config.train.steps
        if self.validation and _due(config.evaluate.interval, step, last):
            self.judge.settle(self.recorder.flush(), self.gradients)
            with self.phases.during("evaluation", step):
                self.evaluate(step)
        if self.tokenizer is not None and _due(config.evaluate.sample_interval, step, last):
            with self.phases.during("evaluation", step):
                self.sample(step, self.tokenizer)
        if not last and _due(config.checkpoint.interval, step, last):
            self._save()
        self.saver.poll()
        self.collector.collect(step)

    def _save(self, final: bool = False) -> None:
        """A checkpoint follows all that is told of its step, and holds nothing that is known to be bad."""
        with self.phases.during("save", self.progress.step):
            self.judge.settle(self.recorder.flush(), self.gradients)
            self.judge.compare_copies(self.progress.step, all_copies(self.model, self.optimizer))
            if final:
                self.saver.save_and_wait()
            else:
                self.saver.save()

    def begin_after(self, origin: Origin, rollbacks: list[Rollback]) -> None:
        """Return to the checkpoint `origin`, from where on nothing is read that `rollbacks` pass over. Collective."""
        load_origin(origin, self.model, self.optimizer)
        self.judge.give_up_gradients()
        self.progress.load(origin.state["progress"])
        self.progress.pass_over(rollbacks)
        self.recorder.begin_after(origin.step)
        self.saver.saved_step = origin.step
        self.batches.close()
        self.batches = self.read_on()

    def evaluate(self, step: int) -> None:
        """Evaluate; held-out data that cannot be read cost a warning, not the run."""
        fault_point("evaluation", step)
        try:
            losses = evaluate(self.model, self.validation, self.config, self.meshes, self.device)
        except UserError as error:
            log.warning("no evaluation at step %d: %s", step, error)
        else:
            self.recorder.evaluation(step, losses)

    def sample(self, step: int, tokenizer: Tokenizer) -> None:
        """Log what the model writes. A failure on all ranks costs a warning, not the run.

        A rank that fails alone waits for the others until the watchdog ends them all: if it went on, its next collective
        would be matched with one of theirs.
        """

        def write() -> str:
            return write_sample(self.model, tokenizer, self.config, self.device, step)

        try:
            text = on_every_rank("sampling", write, self.sampling_group)
        except UserError as error:
            log.warning("no sample at step %d: %s", step, error)
        else:
            self.recorder.sample(step, text)


def _due(interval: int, step: int, last: bool) -> bool:
    return interval > 0 and (step % interval == 0 or last)
