"""Puts together what the loop works with, from the configuration and the ranks at hand."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from forge import compat
from forge.checkpoint import Checkpoints
from forge.config import Config, Degrees
from forge.data.build import build_dataset, build_tokenizer, build_validation, input_fingerprints
from forge.data.dataset import PackedDataset
from forge.data.loader import Loader
from forge.data.sources import Source
from forge.data.tokenizer import Tokenizer
from forge.distributed import World, on_every_rank
from forge.model import flops_per_token, parameter_counts
from forge.observe.collector import Collector
from forge.observe.memory_report import MemoryReport
from forge.observe.metrics import MetricsLog
from forge.observe.profile import StepProfiler
from forge.observe.run_directory import RunDirectory
from forge.observe.tensorboard import Board
from forge.optim import Optimizer, build_optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.mesh import Meshes, make_meshes
from forge.parallel.model import ParallelModel
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
    optimizer: Optimizer


def open_inputs(config: Config) -> Inputs:
    """Open and check all data. Collective: an error on any rank is raised on every rank."""
    dataset = on_every_rank("opening the data", lambda: build_dataset(config))
    validation = on_every_rank("opening the held-out data", lambda: build_validation(config))
    tokenizer = on_every_rank("opening the tokenizer", lambda: build_tokenizer(config))
    return Inputs(dataset, validation, tokenizer, input_fingerprints(dataset, tokenizer))


def build(job: Job) -> Built:
    """Meshes, a freshly initialised model and its optimizer. Collective."""
    config = job.config
    meshes = make_meshes(job.degrees, job.world.device.type)
    compat.raise_timeouts(patience(config.resilience))
    model = build_parallel_model(config, meshes, job.world.device)
    compat.raise_timeouts(patience(config.resilience))  # of groups that engines have made
    optimizer = build_optimizer(model.shards, config.optimizer, meshes.stage)
    job.memory.take_in(model.memory(), optimizer.tensors())
    _tell_of(job, model)
    return Built(meshes, model, optimizer)


def _tell_of(job: Job, model: ParallelModel) -> None:
    """Log what has been built: its memory, size and layout."""
    config, counts = job.config, parameter_counts(job.config.model)
    log.info("%s: %s", config.parallel.data_parallel, job.memory.per_parameter(counts.total))
    size = f"{counts.total:,} parameters" + (f" ({counts.active:,} active)" if counts.idle else "")
    degrees = vars(job.degrees) | {"accumulation": 1}
    layout = " ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1) or "one process"
    steps = f"{job.degrees.accumulation} microbatches per step"
    if job.degrees.accumulation > 1:
        steps += f"; {model.accumulation_memory_summary()}"
    log.info("%s: %s, %s, %s", config.run.name, size, layout, steps)


def assemble(
    job: Job, checkpoints: Checkpoints, inputs: Inputs, built: Built, progress: Progress, stack: ExitStack
) -> Training:
    """The training, about to make the step after `progress`; what must be closed is closed by `stack`."""
    config, world, resilience = job.config, job.world, job.config.resilience
    time_limit = TimeLimit(resilience.time_limit_s, job.launched)
    job.phases.listen(time_limit.enter)

    def read_on() -> Loader:
        return Loader(
            inputs.dataset,
            global_batch_size=config.train.global_batch_size,
            rank=built.meshes.data_rank,
            ranks=built.meshes.data_ranks,
            start_sample=progress.next_sample,
            passed_over=progress.passed_over,
            device=world.device,
            prefetch=config.data.prefetch,
        )

    first = world.rank == 0
    metrics = MetricsLog(job.directory.metrics) if first else None
    board = Board(job.directory.tensorboard, first and config.metrics.tensorboard, progress.step)
    stack.enter_context(board)
    flops = flops_per_token(config.model, config.train.seq_len)
    profiler = StepProfiler(config.profile, world.rank, job.directory.profile, world.device)
    training = Training(
        config=config,
        meshes=built.meshes,
        device=world.device,
        model=built.model,
        optimizer=built.optimizer,
        progress=progress,
        batches=read_on(),
        read_on=read_on,
        validation=inputs.validation if config.evaluate.interval else {},
        tokenizer=inputs.tokenizer if config.evaluate.sample_interval else None,
        recorder=Recorder(config, world.device, world.size, flops, metrics, board, job.reporter.running),
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
            resilience.straggler_interval,
            resilience.straggler_factor,
            _last_block(built.model),
            world.device,
            job.reporter.event,
        ),
        phases=job.phases,
        collector=stack.enter_context(Collector(config.train.gc_interval)),
        sampling_group=dist.new_group(backend="gloo") if config.evaluate.sample_interval else None,
        watchers=[job.memory, stack.enter_context(profiler)],
    )
    # A roll-back puts another one in its place.
    stack.callback(lambda: training.batches.close())
    return training


def _last_block(model: ParallelModel) -> nn.Module | None:
    """The last block of this rank; a part that owns none may come before or after others."""
    blocks = [block for part in model.parts for block in part.layers.values()]
    return blocks[-1] if blocks else None
