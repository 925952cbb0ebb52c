"""One run from its configuration to its exit code: takes the run directory, finds where to begin, builds, trains, reports."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forge.checkpoint import Checkpoints
from forge.config import Config, Degrees, to_toml
from forge.data.build import build_dataset, build_tokenizer, build_validation, input_fingerprints
from forge.data.loader import Loader
from forge.errors import FAILED, FINISHED, STOPPED, UserError
from forge.model import flops_per_token, parameter_counts
from forge.observe.collector import Collector
from forge.observe.events import EventLog
from forge.observe.files import replace_atomically
from forge.observe.log import setup_logging
from forge.observe.memory_report import MemoryReport
from forge.observe.metrics import MetricsLog
from forge.observe.profile import StepProfiler
from forge.observe.run_directory import RunDirectory
from forge.observe.status import State, write_status
from forge.observe.tensorboard import Board
from forge.optim import build_optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.fsdp import held_while_accumulating
from forge.parallel.mesh import make_meshes
from forge.parallel.world import World, on_every_rank, on_first_rank
from forge.resilience.signals import StopSignals
from forge.train.loop import Training
from forge.train.recorder import Recorder
from forge.train.resume import Origin, check_inputs, find_origin, load_origin, load_weights
from forge.train.save import Saver
from forge.train.state import Progress

log = logging.getLogger(__name__)


def run(config: Config, degrees: Degrees, world: World) -> int:
    """Train as `config` says on the joined ranks and return this worker's exit code. Collective.

    Raises UserError for what the user can mend; `status.json` has then been written where the run directory was ours.
    """
    directory = RunDirectory(Path(config.run.output_dir) / config.run.name)
    on_first_rank(directory.acquire)
    try:
        return _run_in(directory, config, degrees, world)
    finally:
        directory.release()


def _run_in(directory: RunDirectory, config: Config, degrees: Degrees, world: World) -> int:
    setup_logging(world.rank, directory.logs)
    reporter = _Reporter(directory, world)
    memory = MemoryReport(world.device, reporter.event)
    try:
        with StopSignals(speak=world.rank == 0) as signals, memory.explaining(config, degrees):
            finished = _train(config, degrees, world, directory, reporter, signals, memory)
    except UserError as error:
        reporter.ended("failed", str(error), error.exit_code)
        raise
    except BaseException as error:
        reporter.ended("failed", f"{type(error).__name__}: {error}", FAILED)
        raise
    if finished:
        reporter.ended("finished", "all steps done", FINISHED)
        return FINISHED
    # A launcher with restarts left would start a planned stop again at once; status.json is what job scripts go by.
    code = FINISHED if world.restarts_left > 0 else STOPPED
    reporter.ended("stopped", signals.reason or "another rank was asked to stop", code)
    return code


class _Reporter:
    """status.json and events.jsonl; silent on all ranks but the first."""

    def __init__(self, directory: RunDirectory, world: World):
        self._status = directory.status if world.rank == 0 else None
        self.events = EventLog(directory.events) if world.rank == 0 else None
        self.step = 0

    def event(self, kind: str, **fields: Any) -> None:
        if self.events is not None:
            self.events.write(kind, **fields)

    def running(self, step: int) -> None:
        self.step = step
        if self._status is not None:
            write_status(self._status, state="running", step=step, reason="", exit_code=None)

    def ended(self, state: State, reason: str, exit_code: int) -> None:
        self.event(state, step=self.step, reason=reason, exit_code=exit_code)
        if self._status is not None:
            write_status(self._status, state=state, step=self.step, reason=reason, exit_code=exit_code)


def _train(
    config: Config,
    degrees: Degrees,
    world: World,
    directory: RunDirectory,
    reporter: _Reporter,
    signals: StopSignals,
    memory: MemoryReport,
) -> bool:
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    reporter.running(0)
    reporter.event("started", world_size=world.size, launcher=world.launcher, layout=vars(degrees))

    checkpoints = Checkpoints(
        directory.checkpoints,
        keep_last=config.checkpoint.keep_last,
        keep_every=config.checkpoint.keep_every,
        mode=config.checkpoint.mode,
    )
    origin = find_origin(config, checkpoints)
    for fallback in checkpoints.fallbacks:
        reporter.event("fallback", problem=fallback)
    dataset = on_every_rank(lambda: build_dataset(config))
    validation = on_every_rank(lambda: build_validation(config))
    tokenizer = on_every_rank(lambda: build_tokenizer(config))
    inputs = input_fingerprints(dataset, tokenizer)
    progress = Progress()
    if origin is not None:
        check_inputs(origin, inputs)
        progress.load(origin.state["progress"])
        reporter.running(progress.step)
        if progress.step >= config.train.steps:
            log.info(
                "%s is finished: step %d of %d. Raise train.steps to go on.",
                config.run.name,
                progress.step,
                config.train.steps,
            )
            return True

    meshes = make_meshes(degrees, world.device.type)
    model = build_parallel_model(config, meshes, world.device)
    optimizer = build_optimizer(model.shards, config)
    memory.take_in(model.shards, optimizer.tensors())
    _begin(config, origin, checkpoints, model, optimizer, directory, reporter, world)

    log.info(
        "%s: %s parameters, %s",
        config.run.name,
        f"{parameter_counts(config.model).total:,}",
        _layout_line(degrees, held_while_accumulating(config, model.shards)),
    )
    with ExitStack() as stack:
        first = world.rank == 0
        recorder = Recorder(
            config,
            progress,
            world.device,
            world.size,
            flops_per_token(config.model, config.train.seq_len),
            MetricsLog(directory.metrics) if first else None,
            stack.enter_context(Board(directory.tensorboard, config.metrics.tensorboard, progress.step))
            if first
            else None,
            reporter.running,
        )
        batches = Loader(
            dataset,
            global_batch_size=config.train.global_batch_size,
            rank=meshes.data_rank,
            ranks=meshes.data_ranks,
            start_sample=progress.next_sample,
            device=world.device,
            prefetch=config.data.prefetch,
        )
        stack.callback(batches.close)
        training = Training(
            config=config,
            meshes=meshes,
            device=world.device,
            model=model,
            optimizer=optimizer,
            progress=progress,
            batches=batches,
            validation=validation if config.evaluate.interval else {},
            tokenizer=tokenizer if config.evaluate.sample_interval else None,
            recorder=recorder,
            saver=Saver(
                checkpoints, config, meshes, model, optimizer, progress, tokenizer, inputs, reporter.events
            ),
            signals=signals,
            collector=stack.enter_context(Collector(config.train.gc_interval)),
            watchers=[
                memory,
                stack.enter_context(
                    StepProfiler(config.profile, world.rank, directory.profile, world.device)
                ),
            ],
        )
        finished = training.run()
    reporter.step = progress.step
    return finished


def _begin(
    config: Config,
    origin: Origin | None,
    checkpoints: Checkpoints,
    model: Any,
    optimizer: Any,
    directory: RunDirectory,
    reporter: _Reporter,
    world: World,
) -> None:
    """Load what the run starts from, and make the run directory tell this history and no other."""
    step = origin.step if origin is not None else 0
    if origin is not None:
        load_origin(origin, model, optimizer)
        log.info("resumed from %s at step %d", origin.path, step)
    elif config.checkpoint.init:
        load_weights(config, model, checkpoints)
        log.info("weights from %s, a new history", config.checkpoint.init)
    checkpoints.set_aside_after(step)
    reporter.event(
        "resumed" if origin is not None else "fresh", step=step, path=str(origin.path) if origin else None
    )
    if world.rank == 0:
        MetricsLog(directory.metrics).cut(step)
        replace_atomically(directory.config, to_toml(config).encode())
    dist.barrier()


def _layout_line(degrees: Degrees, held: str) -> str:
    axes = {name: size for name, size in vars(degrees).items() if name != "accumulation" and size > 1}
    layout = " ".join(f"{name}={size}" for name, size in axes.items()) or "one process"
    held = f"; {held}" if degrees.accumulation > 1 else ""
    return f"{layout}, {degrees.accumulation} microbatches per step{held}"
