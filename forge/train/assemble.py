"""Puts together what the loop works with, from the configuration and the ranks at hand."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from forge import compat
from forge.checkpoint import Checkpoints
from forge.config import Config, Degrees
from forge.data.build import build_dataset, build_tokenizer, build_validation, input_fingerprints
from forge.data.dataset import PackedDataset
from forge.data.loader import Loader
from forge.data.sources import Source
from forge.data.tokenizer import Tokenizer
from forge.model import flops_per_token, parameter_counts
from forge.observe.collector import Collector
from forge.observe.memory_report import MemoryReport
from forge.observe.metrics import MetricsLog
from forge.observe.profile import StepProfiler
from forge.observe.run_directory import RunDirectory
from forge.observe.tensorboard import Board
from forge.optim import AdamW, build_optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.execute import ParallelModel
from forge.parallel.mesh import Meshes, make_meshes
from forge.parallel.world import World, on_every_rank
from forge.resilience.signals import StopSignals
from forge.resilience.stragglers import Stragglers
from forge.resilience.time_limit import TimeLimit
from forge.resilience.watchdog import patience
from forge.train.judge import Judge
from forge.train.loop import Training
from forge.train.recorder import Recorder
from forge.train.report import Reporter
from forge.train.rollback import Rollbacks
from forge.train.save import Saver
from forge.train.state import Progress
from forge.train.watch import Phases

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """What a run is given: its configuration, its ranks, its directory, and what watches over it from the start.

    launched: when the run was launched, on the monotonic clock; its launcher may have restarted it since.
    """

    config: Config
    degrees: Degrees
    world: World
    directory: RunDirectory
    reporter: Reporter
    signals: StopSignals
    memory: MemoryReport
    phases: Phases
    launched: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Inputs:
    """What a run reads, and the fingerprints by which a resumed run knows it again."""

    dataset: PackedDataset
    validation: dict[str, Source]
    tokenizer: Tokenizer | None
    fingerprints: dict[str, Any]


@dataclass(frozen=True)
class Built:
    """The model over the ranks, and its optimizer."""

    meshes: Meshes
    model: ParallelModel
    optimizer: AdamW


def open_checkpoints(job: Job) -> Checkpoints:
    """The run's checkpoint folder. Collective."""
    wanted = job.config.checkpoint
    return Checkpoints(
        job.directory.checkpoints,
        keep_last=wanted.keep_last,
        keep_every=wanted.keep_every,
        mode=wanted.mode,
    )


def open_inputs(config: Config) -> Inputs:
    """Open and check all data. Collective; what any rank finds wrong is UserError on every rank."""
    dataset = on_every_rank(lambda: build_dataset(config))
    validation = on_every_rank(lambda: build_validation(config))
    tokenizer = on_every_rank(lambda: build_tokenizer(config))
    return Inputs(dataset, validation, tokenizer, input_fingerprints(dataset, tokenizer))


def build(job: Job) -> Built:
    """Meshes, a freshly initialised model and its optimizer. Collective."""
    config = job.config
    meshes = make_meshes(job.degrees, job.world.device.type)
    compat.raise_timeouts(patience(config.resilience))
    model = build_parallel_model(config, meshes, job.world.device)
    compat.raise_timeouts(patience(config.resilience))  # of groups that engines have made
    optimizer = build_optimizer(model.shards, config)
    job.memory.take_in(model.memory(), optimizer.tensors())
    counts = parameter_counts(config.model)
    log.info("%s: %s", config.parallel.data_parallel, job.memory.per_parameter(counts.total))
    log.info(
        "%s: %s parameters%s, %s",
        config.run.name,
        f"{counts.total:,}",
        f" ({counts.active:,} active)" if counts.idle else "",
        _layout_line(job.degrees, model.held_while_accumulating()),
    )
    return Built(meshes, model, optimizer)


def _layout_line(degrees: Degrees, held: str) -> str:
    axes = {name: size for name, size in vars(degrees).items() if name != "accumulation" and size > 1}
    layout = " ".join(f"{name}={size}" for name, size in axes.items()) or "one process"
    held = f"; {held}" if degrees.accumulation > 1 else ""
    return f"{layout}, {degrees.accumulation} microbatches per step{held}"


def assemble(
    job: Job, checkpoints: Checkpoints, inputs: Inputs, built: Built, progress: Progress, stack: ExitStack
) -> Training:
    """The training, about to make the step after `progress`; what must be closed is closed by `stack`."""
    config, world = job.config, job.world
    time_limit = TimeLimit(config.resilience.time_limit_s, job.launched)
    job.phases.listen(time_limit.enter)
    training = Training(
        config=config,
        meshes=built.meshes,
        device=world.device,
        model=built.model,
        optimizer=built.optimizer,
        progress=progress,
        batches=_loader(job, inputs, built, progress),
        read_on=lambda: _loader(job, inputs, built, progress),
        validation=inputs.validation if config.evaluate.interval else {},
        tokenizer=inputs.tokenizer if config.evaluate.sample_interval else None,
        recorder=_recorder(job, progress, stack),
        judge=Judge(config, progress, built.model, world.device, job.reporter.event),
        roll_back=Rollbacks(job.directory, checkpoints, job.reporter.event),
        saver=Saver(
            checkpoints,
            config,
            built.meshes,
            built.model,
            built.optimizer,
            progress,
            inputs.tokenizer,
            inputs.fingerprints,
            job.reporter.events,
        ),
        signals=job.signals,
        time_limit=time_limit,
        stragglers=Stragglers(
            config.resilience.straggler_interval,
            config.resilience.straggler_factor,
            _last_block(built.model),
            world.device,
            job.reporter.event,
        ),
        phases=job.phases,
        collector=stack.enter_context(Collector(config.train.gc_interval)),
        watchers=[
            job.memory,
            stack.enter_context(
                StepProfiler(config.profile, world.rank, job.directory.profile, world.device)
            ),
        ],
    )
    # A roll-back puts another one in its place.
    stack.callback(lambda: training.batches.close())
    return training


def _last_block(model: ParallelModel) -> nn.Module | None:
    """The last block of this rank; a part that owns none may come before or after others."""
    blocks = [block for part in model.parts for block in part.layers.values()]
    return blocks[-1] if blocks else None


def _recorder(job: Job, progress: Progress, stack: ExitStack) -> Recorder:
    config, directory = job.config, job.directory
    metrics = board = None
    if job.world.rank == 0:
        metrics = MetricsLog(directory.metrics)
        board = stack.enter_context(Board(directory.tensorboard, config.metrics.tensorboard, progress.step))
    return Recorder(
        config,
        job.world.device,
        job.world.size,
        flops_per_token(config.model, config.train.seq_len),
        metrics,
        board,
        job.reporter.running,
    )


def _loader(job: Job, inputs: Inputs, built: Built, progress: Progress) -> Loader:
    return Loader(
        inputs.dataset,
        global_batch_size=job.config.train.global_batch_size,
        rank=built.meshes.data_rank,
        ranks=built.meshes.data_ranks,
        start_sample=progress.next_sample,
        passed_over=progress.passed_over,
        device=job.world.device,
        prefetch=job.config.data.prefetch,
    )
