"""The training loop, and what is due after a step."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from forge.config import Config
from forge.data.loader import Loader
from forge.data.sources import Source
from forge.data.tokenizer import Tokenizer
from forge.fault import fault_point
from forge.observe.collector import Collector
from forge.optim import AdamW, learning_rate
from forge.parallel.execute import ParallelModel
from forge.parallel.gradients import clip_gradients, report_gradients
from forge.parallel.mesh import Meshes
from forge.resilience.signals import StopSignals
from forge.train.evaluate import evaluate, write_sample
from forge.train.recorder import Recorder, StepFacts
from forge.train.save import Saver
from forge.train.state import Progress
from forge.train.watch import Phases, Watcher

log = logging.getLogger(__name__)


@dataclass
class Training:
    """Everything that the loop works with."""

    config: Config
    meshes: Meshes
    device: torch.device
    model: ParallelModel
    optimizer: AdamW
    progress: Progress
    batches: Loader
    validation: dict[str, Source]
    tokenizer: Tokenizer | None
    recorder: Recorder
    saver: Saver
    signals: StopSignals
    phases: Phases
    collector: Collector
    watchers: list[Watcher]

    def run(self) -> bool:
        """Train until `train.steps`; True if it got there, False if it was asked to stop. Saves at the end either way."""
        while self.progress.step < self.config.train.steps and not self.recorder.stop_asked:
            step = self.progress.step + 1
            for watcher in self.watchers:
                watcher.before_step(step)
            self.step()
            for watcher in self.watchers:
                watcher.after_step(step)
            self.after_step()
        self.recorder.flush()
        with self.phases.during("save", self.progress.step):
            self.saver.save_and_wait()
        self.phases.enter("end")
        return self.progress.step >= self.config.train.steps

    def step(self) -> None:
        """One optimizer step. Nothing in it waits for the device."""
        began = time.perf_counter()
        step = self.progress.step + 1
        self.phases.enter("data", step)
        batch = next(self.batches)
        self.phases.enter("step", step)
        fault_point("step", step)
        lr = learning_rate(
            self.config.schedule, lr=self.config.optimizer.lr, step=step, steps=self.config.train.steps
        )

        tokens = self.model.count_tokens(batch)
        sums = self.model.forward_backward(batch, tokens)
        self.model.finalize_gradients()
        report = report_gradients(self.model.shards, sums.objective, stop=self.signals.reason is not None)
        clip_gradients(self.model.shards, report.norm, self.config.train.grad_clip_norm)
        self.optimizer.step(lr, report.skip)
        self.model.after_update()
        self.model.update_router(report.skip)
        self.model.zero_gradients()

        self.progress.advance(self.config)
        self.recorder.record(StepFacts(step, self.progress.tokens, lr), sums, report)
        self.recorder.add_time(
            time.perf_counter() - began, self.batches.wait_s, self.collector.take_seconds()
        )

    def after_step(self) -> None:
        """Evaluate, sample, save and collect garbage where due, in this order: a checkpoint follows all lines of its step."""
        step, config = self.progress.step, self.config
        last = step == config.train.steps
        if self.validation and _due(config.evaluate.interval, step, last):
            self.recorder.flush()
            with self.phases.during("evaluation", step):
                self.evaluate(step)
        if self.tokenizer is not None and _due(config.evaluate.sample_interval, step, last):
            with self.phases.during("evaluation", step):
                self.sample(step, self.tokenizer)
        if not last and _due(config.checkpoint.interval, step, last):
            self.recorder.flush()
            with self.phases.during("save", step):
                self.saver.save()
        self.saver.poll()
        self.collector.collect(step)

    def evaluate(self, step: int) -> None:
        losses = evaluate(self.model, self.validation, self.config, self.meshes, self.device)
        self.recorder.evaluation(step, losses)

    def sample(self, step: int, tokenizer: Tokenizer) -> None:
        """Show what the model writes; whatever goes wrong there costs a warning, not the run."""
        try:
            self.recorder.sample(step, write_sample(self.model, tokenizer, self.config, self.device, step))
        except Exception as error:
            log.warning("no sample at step %d: %s: %s", step, type(error).__name__, error)


def _due(interval: int, step: int, last: bool) -> bool:
    return interval > 0 and (step % interval == 0 or last)
