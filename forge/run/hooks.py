"""All hooks of a run in calling order, including those of `train.hooks`."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forge.checkpoint import Checkpoints
from forge.config import Config
from forge.data.epochs import check_caps, epochs, log_epochs, log_left_out
from forge.data.loader import mixtures_ahead
from forge.hook import Hook, StepResult
from forge.observe.hardware import process_age_s
from forge.observe.json_lines import read_lines
from forge.observe.profile import StepProfiler, report_missing_profiles
from forge.observe.trackers import PATIENCE_S, require_packages
from forge.resilience.elastic import is_elastic
from forge.resilience.stopping import TimeLimit
from forge.resilience.stragglers import Stragglers
from forge.run.mirrored import MIRROR_AT_STOP_S, MirrorSaves
from forge.run.nodes import Recovery
from forge.run.save import Saves
from forge.run.tiers import LocalSaves, Tiers
from forge.runtime.causes import Cause
from forge.runtime.errors import UserError
from forge.runtime.fault import fault_point
from forge.runtime.imports import load_class
from forge.runtime.tools import TASK_SCORES, TEXT_SAMPLES
from forge.train.evaluate import Evaluation
from forge.train.monitor import StepMonitors
from forge.train.phases import PhaseChanges
from forge.train.source_losses import SourceLosses
from forge.train.trainer import Trainer


def load_hooks(config: Config) -> list[tuple[str, type[Hook]]]:
    """Return (import path, class) of the enabled hooks for text samples and task scores, then of those in `train.hooks`.

    Raises UserError if a hook cannot be loaded, a package is missing, or `evaluate.tasks_path` is not a folder.
    """
    require_packages(config.metrics.trackers)
    samples = [TEXT_SAMPLES] if config.evaluate.sample_interval else []
    tasks = [TASK_SCORES] if config.evaluate.tasks and config.evaluate.tasks_interval else []
    if tasks and find_spec("lm_eval") is None:
        raise UserError("evaluate.tasks: needs the package lm-eval: pip install 'forge[eval]'")
    if tasks and not Path(config.evaluate.tasks_path).is_dir():  # "" is the current folder
        raise UserError(f"evaluate.tasks_path = {config.evaluate.tasks_path}: is not a folder")
    return [(path, _load(path)) for path in [*samples, *tasks, *config.train.hooks]]


def make_hooks(
    trainer: Trainer,
    checkpoints: Checkpoints,
    loaded: list[tuple[str, type[Hook]]],
    tiers: Tiers,
    restarted: bool = False,
) -> list[Hook]:
    """Return all enabled hooks of a run, in calling order. Collective.

    restarted: True on the first rank after a restart. Hooks that save come last, because a checkpoint follows all other
    output of its step. Raises UserError if a hook refuses the run.
    """
    config, world, directory = trainer.config, trainer.reporter.world, trainer.reporter.directory
    saves = Saves(trainer, checkpoints)
    hooks: list[Hook] = [trainer.reporter.phases, FaultPoints(), DataStalls(trainer)]
    if is_elastic() or restarted:
        hooks.append(Recovery(trainer.reporter))
    if limit_s := time_limit_s(config):
        hooks.append(StopBeforeTimeLimit(trainer, saves, limit_s))
    if config.resilience.straggler_interval and world.size > 1:
        hooks.append(
            Stragglers(config.resilience, trainer.model.parts, trainer.device, trainer.reporter.event)
        )
    if config.metrics.sources:
        hooks.append(SourceLosses(trainer))
    if config.phase:
        hooks.append(PhaseChanges(trainer))
    hooks += [Epochs(trainer), trainer.metrics, trainer.reporter.memory]
    if world.rank == 0:
        report_missing_profiles(config.profile, world.size, trainer.progress.step, config.train.steps)
    if config.profile.span and world.rank in config.profile.ranks:
        hooks.append(StepProfiler(config.profile, world.rank, directory.profile, trainer.device))
    hooks.append(trainer.collector)
    if config.metrics.monitor_interval:
        hooks.append(StepMonitors(trainer))
    if trainer.data.validation:
        hooks.append(Evaluation(trainer))
    for path, kind in loaded:
        # A user's class may have any constructor with one argument, so its type is unknown.
        constructor: Any = kind
        hook: Hook = constructor(trainer)
        hook.name = path
        hooks.append(hook)
    hooks.append(saves)
    if config.checkpoint.local_interval:
        hooks.append(LocalSaves(trainer, saves, tiers))
    if config.checkpoint.mirror and world.rank == 0:
        hooks.append(MirrorSaves(trainer, checkpoints))
    return hooks


class FaultPoints(Hook):
    """Calls the fault-injection point of each step."""

    def after_data(self, step: int) -> None:
        fault_point("step", step)


class DataStalls(Hook):
    """Reports long waits for data, with their cause, as events."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer

    def after_data(self, step: int) -> None:
        if stall := self._trainer.batches.stall:
            fields = {"step": step, "seconds": stall.seconds, "waited_for": stall.cause}
            self._trainer.reporter.event(Cause.DATA_STALL, **fields)


class Epochs(Hook):
    """Reports the number of epochs read from each data source, at the start and in the training lines of the metrics.

    Raises UserError if a source would exceed its max_epochs.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        train, progress, phases = trainer.config.train, trainer.progress, trainer.phases
        now = trainer.data.dataset.following(trainer.batches.order)
        ranges = phases.ranges(train.steps - progress.step, progress.tokens)
        then, last = now, progress.next_sample
        for dataset, first, end in mixtures_ahead(now, ranges, last):
            log_left_out(dataset, first, end)
            then, last = dataset, end
        check_caps(then, last)
        log_epochs(epochs(now, progress.next_sample), epochs(then, last))

    def after_result(self, result: StepResult) -> None:
        metrics, dataset = self._trainer.metrics, self._trainer.data.dataset
        if metrics.writes(result):
            read = epochs(dataset.following(self._trainer.progress.order), result.next_sample)
            metrics.publish(result.step, {"epochs": read} if read else {})


def time_limit_s(config: Config) -> float:
    """Return the smaller of `resilience.time_limit_s` and FORGE_TIME_LIMIT_S in seconds, ignoring zeros. 0: no limit.

    scripts/slurm/job.py sets the variable to the job's limit, because config.toml records only the user's limit.
    """
    limits = config.resilience.time_limit_s, float(os.environ.get("FORGE_TIME_LIMIT_S", "0"))
    return min((limit for limit in limits if limit), default=0.0)


class StopBeforeTimeLimit(Hook):
    """Requests the end of the run early enough to save a checkpoint before `limit_s`, in seconds since its launch."""

    def __init__(self, trainer: Trainer, saves: Saves, limit_s: float):
        self._trainer, self._saves = trainer, saves
        self._limit_s = limit_s
        # The limit counts from the launch of the run's first process. The launcher may have restarted this process.
        launched = time.monotonic() - process_age_s(trainer.reporter.world.first_process)
        config = trainer.config
        waits_s = MIRROR_AT_STOP_S if config.checkpoint.mirror else 0.0
        waits_s += sum(PATIENCE_S for where in config.metrics.trackers.values() if where)
        self._known_s = _slowest_evaluation_s(trainer)
        self._limit = TimeLimit(self._limit_s, launched, waits_s, self._known_s)
        trainer.reporter.phases.listen(self._limit.enter)

    def after_data(self, step: int) -> None:
        if self._limit.evaluations_s > 1.1 * self._known_s + 1.0:
            self._known_s = self._limit.evaluations_s
            self._trainer.reporter.event("slow_evaluation", step=step - 1, seconds=round(self._known_s, 1))
        plan = self._trainer.plan
        following = self._trainer.phases.at(self._trainer.progress.tokens + plan.tokens)
        self._limit.expect(following.tokens / plan.tokens, following.may_compile_after(plan))
        if self._limit.near(self._saves.slowest_s):
            self._trainer.request_stop(
                f"the time limit of {self._limit_s:g} s is near (resilience.time_limit_s or the job's time)",
                final=False,
            )


def _slowest_evaluation_s(trainer: Trainer) -> float:
    """Return the longest time of all evaluations after one step of this history, measured by earlier processes.

    Return 0 on all ranks but the first, and without evaluations.
    """
    evaluate, slowest = trainer.config.evaluate, 0.0
    intervals = evaluate.interval, evaluate.sample_interval, evaluate.tasks_interval
    if trainer.reporter.world.rank != 0 or not any(intervals):
        return 0.0
    for event in read_lines(trainer.reporter.directory.events, "event"):
        if event["event"] == "fresh":
            slowest = 0.0
        elif event["event"] == "slow_evaluation":
            slowest = max(slowest, float(event["seconds"]))
    return slowest


def _load(path: str) -> type[Hook]:
    needed = "needed: a subclass of forge.hook.Hook, see docs/internals/extending/hook.md"
    try:
        found = load_class(path)
    except ValueError as error:
        raise UserError(f'train.hooks: "{path}": {error}; {needed}') from error
    if not issubclass(found, Hook):
        raise UserError(f'train.hooks: "{path}" is not a hook; {needed}')
    return found
