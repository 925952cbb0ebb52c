"""One run from its configuration to its exit code: takes the run directory, finds where to begin, builds, trains, reports."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from forge import compat
from forge.checkpoint import Checkpoints
from forge.config import Config, Degrees, to_toml
from forge.distributed import World, on_every_rank, on_first_rank
from forge.errors import FINISHED, STOPPED, UserError
from forge.fault import fault_point
from forge.files import replace_atomically
from forge.observe.hardware import process_age_s
from forge.observe.log import setup_logging
from forge.observe.memory_report import MemoryReport
from forge.observe.metrics import MetricsLog
from forge.observe.run_directory import RunDirectory
from forge.resilience.anomalies import SpikeWindow
from forge.resilience.signals import StopSignals
from forge.resilience.watchdog import Watchdog, bounds, patience
from forge.train.assemble import Built, Job, assemble, build, open_inputs
from forge.train.last_words import LastWords
from forge.train.report import Reporter
from forge.train.resume import Origin, check_inputs, find_origin, load_origin, load_weights
from forge.train.rollback import remember
from forge.train.state import Progress
from forge.train.watch import Phases

log = logging.getLogger(__name__)


def run(config: Config, degrees: Degrees, world: World) -> int:
    """Train as `config` says on the joined ranks and return this worker's exit code. Collective.

    Raises UserError for what the user can mend; `status.json` has then been written where the run directory was ours.
    """
    directory = RunDirectory(Path(config.run.output_dir) / config.run.name)
    holder = on_first_rank("locking the run directory", directory.acquire)
    try:
        on_every_rank(
            "finding the run directory",
            lambda: directory.find(holder) if world.local_rank == 0 and world.rank > 0 else None,
        )
        return _run_in(directory, config, degrees, world)
    finally:
        directory.release()


def _run_in(directory: RunDirectory, config: Config, degrees: Degrees, world: World) -> int:
    setup_logging(world.rank, directory.logs)
    compat.raise_timeouts(patience(config.resilience))
    reporter, phases = Reporter(directory, world, time.monotonic() - process_age_s()), Phases()
    if reporter.ledger is not None:
        phases.listen(reporter.ledger.enter)
    memory = MemoryReport(world.device, reporter.event)
    last_words = LastWords(reporter, world, directory.logs)
    watchdog = Watchdog(
        bounds(config.resilience),
        directory.logs,
        world.rank,
        last_words.of_watchdog,
        alarm=last_words.alarm,
        alarm_s=1.0 if world.size <= 64 else 5.0,
    )
    # Signals are taken until all is told: torchrun sends one to rank 0 as soon as another rank has left or died.
    with StopSignals(speak=world.rank == 0) as signals:
        try:
            with watchdog, memory.explaining(config, degrees):
                phases.listen(watchdog.enter)
                launched = time.monotonic() - process_age_s(world.first_process)
                stopped = _train(
                    Job(config, degrees, world, directory, reporter, signals, memory, phases, launched)
                )
                return _tell_end(reporter, world, stopped)
        except UserError as error:
            last_words.of_user_error(error, phases)
            raise
        except BaseException as error:
            last_words.of_error(error, phases)
            raise


def _tell_end(reporter: Reporter, world: World, stopped: str | None) -> int:
    if stopped is None:
        reporter.ended("finished", "all steps done", FINISHED)
        return FINISHED
    # A launcher with restarts left would start a planned stop again at once; status.json is what job scripts go by.
    code = FINISHED if world.restarts_left > 0 else STOPPED
    reporter.ended("stopped", stopped, code)
    return code


def _train(job: Job) -> str | None:
    """Find where to begin, build, train. None when all steps are done, else why the run stopped before."""
    config, reporter, world = job.config, job.reporter, job.world
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    reporter.running(0)
    reporter.event("started", world_size=world.size, launcher=world.launcher, layout=vars(job.degrees))
    fault_point("set-up", 0)

    kept, folder = config.checkpoint, job.directory.checkpoints
    checkpoints = Checkpoints(folder, keep_last=kept.keep_last, keep_every=kept.keep_every, mode=kept.mode)
    origin = find_origin(config, checkpoints)
    for fallback in checkpoints.fallbacks:
        reporter.event("fallback", problem=fallback)
    inputs = open_inputs(config)
    spikes = SpikeWindow(config.resilience.spike_window, config.resilience.spike_threshold)
    progress = Progress(spikes=spikes)
    if origin is not None:
        for change in check_inputs(origin, inputs.fingerprints, config.checkpoint.allow_changed_data):
            reporter.event("changed_data", change=change)
        progress.load(origin.state["progress"])
        reporter.running(progress.step)
        if progress.step >= config.train.steps:
            done = f"step {progress.step} of {config.train.steps}"
            log.info("%s is finished: %s. Raise train.steps to go on.", config.run.name, done)
            return None

    built = build(job)
    _begin(job, origin, checkpoints, built)
    remember(job.directory, origin, progress)
    with ExitStack() as stack:
        stopped = assemble(job, checkpoints, inputs, built, progress, stack).run()
    reporter.step = progress.step
    return stopped


def _begin(job: Job, origin: Origin | None, checkpoints: Checkpoints, built: Built) -> None:
    """Load what the run starts from, and make the run directory tell this history and no other."""
    config, directory = job.config, job.directory
    step = origin.step if origin is not None else 0
    if origin is not None:
        load_origin(origin, built.model, built.optimizer)
        log.info("resumed from %s at step %d", origin.path, step)
    elif config.checkpoint.init:
        load_weights(config, built.model, checkpoints)
        log.info("weights from %s, a new history", config.checkpoint.init)
    checkpoints.set_aside_after(step)
    kind = "fresh" if origin is None else "resumed"
    job.reporter.event(kind, step=step, path=str(origin.path) if origin else None)

    def begin_history() -> None:
        MetricsLog(directory.metrics).cut(step)
        replace_atomically(directory.config, to_toml(config).encode())

    on_first_rank("writing the run directory", begin_history)
