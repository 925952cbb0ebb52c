"""Record a few optimizer steps of a layout, as pieces of tensors on every rank.

The reference (plain.py) makes the same steps on the same batches in one process and records whole tensors. The docstring
of plain.py lists the code that a layout shares with the reference.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from forge.batch import Batch
from forge.config import Config, Phases, StepPlan, check_world, parse_toml_text
from forge.data.build import build_dataset
from forge.data.loader import Loader
from forge.model import IGNORE
from forge.optim import Optimizer, build_optimizer
from forge.optim.optimizer import gradient
from forge.parallel.build import build_parallel_model
from forge.parallel.initialize import initialize
from forge.parallel.mesh import make_meshes
from forge.parallel.step.gradients import report_gradients
from forge.parallel.step.model import ParallelModel
from forge.parallel.step.routers import RouterReport
from forge.shard import Shard
from forge.tools.verify.borders import BatchPart, Borders, Seen
from forge.tools.verify.checkpoints import load, save_and_read
from forge.tools.verify.held_out import held_out_on_rank
from forge.tools.verify.hooks import UserHooks
from forge.tools.verify.pieces import TensorKey, TensorPiece, pieces_of, whole
from forge.train.phases import apply_plan
from forge.train.step import apply_gradients, compute_gradients

CPU = torch.device("cpu")
OptimizerFactory: TypeAlias = Callable[[list[Shard], Config, Any], Optimizer]


@dataclass(frozen=True)
class Twist:
    """Changes made by a test to both the layout and the reference. Functions must be at module level, for pickling.

    routers: called at the start with the routers' local weights and their biases; may change both in place. labels: called
    with the labels of every batch, int64 `[sequences, seq]`, and the data rank; may change the labels in place.
    """

    routers: Callable[[list[Tensor], list[Tensor]], None] | None = None
    labels: Callable[[Tensor, int], None] | None = None

    def begin(self, weights: Iterable[Tensor], biases: Iterable[Tensor]) -> None:
        if self.routers is not None:
            self.routers(list(weights), list(biases))


PLAIN = Twist()


def own_optimizer(shards: list[Shard], config: Config, group: Any) -> Optimizer:
    """Return the config's optimizer. The default of `Settings.optimizer`. group: the optimizer's process group."""
    return build_optimizer(shards, config.optimizer, group)


@dataclass(frozen=True)
class Settings:
    """Options of the recorded steps, for every layout and for the reference. Picklable.

    borders: record module inputs and outputs. uneven: ignore a different number of labels in each sequence, so that ranks
    have different numbers of valid tokens. held_out: evaluate and generate after the first step.
    own_folder: folder in which to save a checkpoint before the last step; None: save none. other_folder: folder of another
    layout's checkpoint; None: load none. The last step is repeated from each of these checkpoints.
    draw_on_cpu: on any device, use the CPU's random numbers for initial values. patch: called first on each rank of a
    layout, but not in the reference.
    """

    steps: int = 3
    lr: float = 1e-3
    max_norm: float = 1.0
    optimizer: OptimizerFactory = own_optimizer
    twist: Twist = PLAIN
    borders: bool = False
    uneven: bool = False
    held_out: bool = False
    own_folder: str | None = None
    other_folder: str | None = None
    draw_on_cpu: bool = False
    patch: Callable[[], object] | None = None


@dataclass
class RankStep:
    """A rank's recording of one step. part: the rank's part of the global batch. seen: borders in computation order."""

    pieces: dict[TensorKey, list[TensorPiece]] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    part: BatchPart | None = None


@dataclass
class RankRecord:
    """A rank's recording of all steps. steps[0] has the initial parameters."""

    steps: list[RankStep]


@dataclass
class WholeRecord:
    """The recording of one process. steps: per step, key -> whole tensor. order: outputs of modules in computation order."""

    steps: list[dict[TensorKey, Tensor]]
    order: list[str]


def record_on_rank(
    rank: int, world: int, text: str, settings: Settings, device: torch.device = CPU
) -> RankRecord:
    """Run the steps of the configuration `text` on its layout of `world` ranks. Return this rank's recording. Collective."""
    if settings.patch is not None:
        settings.patch()
    config = parse_toml_text(text)
    degrees = check_world(config, world)
    meshes = make_meshes(degrees, device.type, offloaded=config.parallel.cpu_offload)
    other: dict[str, Any] = {"values": _drawn_on_cpu} if settings.draw_on_cpu else {}
    model = build_parallel_model(config, meshes, device, **other)
    weights = [shard.data for shard in model.shards if shard.name.endswith("router.weight")]
    settings.twist.begin(weights, [shard.data for shard in model.buffers if shard.name.endswith("bias")])
    optimizer = settings.optimizer(model.shards, config, meshes.stage)
    record = RankRecord([RankStep(pieces_of("initial", ((s, s.data) for s in model.shards)))])
    plans = plans_of(config, settings.steps)
    borders = Borders(model.parts) if settings.borders else None
    read = list(batches(config, meshes.data_rank, meshes.data_ranks, settings, device))
    hooks = UserHooks.of(config, device, model, optimizer, model.shards, settings.own_folder)
    hooks.begin(0)
    for number, (batch, plan) in enumerate(zip(read, plans, strict=True), start=1):
        model.micro_batch_size = plan.micro_batch_size
        apply_plan(plan, None, model.parts, optimizer)
        of_step = replace(settings, lr=settings.lr * plan.lr / config.optimizer.lr)
        record.steps.append(make_step(model, optimizer, batch, number, of_step, borders, hooks))
        record.steps[-1].part = BatchPart.of(meshes, plan.global_batch_size, plan.seq_len)
        if settings.held_out and number == 1:
            record.steps[-1].pieces |= held_out_on_rank(model, config, meshes, device)
            if borders is not None:
                borders.take()
        if settings.own_folder is not None and number == settings.steps - 1:
            hooks.process_last_result()
            hooks.call("before_save", number)
            record.steps[-1].pieces |= hooks.take()
            record.steps[-1].pieces |= save_and_read(model, optimizer, settings.own_folder, number)
    hooks.end()
    record.steps[-1].pieces |= hooks.take()
    if borders is not None:
        borders.remove()
    if settings.own_folder is not None and settings.steps > 1:
        last = record.steps[-1].pieces
        for kind, folder in (("resumed", settings.own_folder), ("continued", settings.other_folder)):
            if folder is not None:
                loaded = load(model, optimizer, folder, settings.steps - 1)
                hooks.begin(settings.steps - 1)
                again = make_step(model, optimizer, read[-1], settings.steps, of_step, None, hooks)
                last |= {
                    (kind, f"{of} {name}"): pieces
                    for (of, name), pieces in again.pieces.items()
                    # Curves of hooks are exempt, because hooks may have state that is not in checkpoints.
                    if of != "curve" and (of, name) in last
                }
                if kind == "continued":
                    record.steps[-2].pieces |= loaded
    hooks.close()
    return record


def plans_of(config: Config, steps: int) -> list[StepPlan]:
    """Return the StepPlan of each of the first `steps` steps."""
    phases = Phases(config)
    return [phases.at(phases.tokens_after(step)) for step in range(steps)]


def _drawn_on_cpu(shards: list[Shard], values: dict[str, Any], seed: int) -> None:
    """Initialise `shards` like `initialize`, but with the random numbers of a CPU. A GPU generates other numbers."""
    for shard in shards:
        mine = torch.empty_like(shard.data, device=CPU)
        initialize([replace(shard, parameter=mine)], values, seed)
        shard.data.copy_(mine)


def make_step(
    model: ParallelModel,
    optimizer: Optimizer,
    batch: Batch,
    number: int,
    settings: Settings,
    borders: Borders | None = None,
    hooks: UserHooks | None = None,
) -> RankStep:
    """Run optimizer step `number` like the trainer, and return its recording. Collective."""
    step, hooks = RankStep(), hooks or UserHooks()
    hooks.call("before_step", number)
    hooks.call("before_data", number)
    hooks.call("after_data", number)
    with hooks.around("gradients", number):
        sums = compute_gradients(model, batch)
        report = report_gradients(model.shards, sums.objective, stop=False)
        if borders is not None:
            step.seen = borders.take()
        tokens = sums.tokens.clamp(min=1)
        step.pieces |= {
            ("loss", "cross-entropy"): [_scalar(sums.cross_entropy / tokens)],
            ("loss", "objective"): [_scalar(sums.objective / tokens)],
            ("norm", "gradient"): [_scalar(report.norm)],
        }
        step.pieces |= pieces_of("gradient", ((shard, gradient(shard)) for shard in model.shards))
        hooks.process_last_result()
    update = hooks.around("optimizer", number)
    report_of_routers = apply_gradients(model, optimizer, report, settings.lr, settings.max_norm, update)
    routers = _routers(model, report_of_routers)
    hooks.launched(number, settings.lr, sums.values, report.norm, routers)
    hooks.call("after_step", number)
    step.pieces |= pieces_of("parameter", ((shard, shard.data) for shard in model.shards))
    step.pieces |= _slots(optimizer)
    step.pieces |= {("router", name): [whole(state)] for name, state in routers.items()}
    step.pieces |= hooks.take()
    return step


def _slots(optimizer: Optimizer) -> dict[TensorKey, list[TensorPiece]]:
    found: dict[TensorKey, list[TensorPiece]] = {}
    for slot, shard, values in optimizer.tensors():
        for (_, name), pieces in pieces_of("optimizer", [(shard, values)]).items():
            found["optimizer", f"{slot} of {name}"] = pieces
    return found


def _routers(model: ParallelModel, report: RouterReport | None) -> dict[str, Tensor]:
    """Return a dict from name to this rank's state of the routers, with the names of `_move_routers` (plain.py)."""
    if report is None:
        return {}
    rows = {
        f"layers.{layer}": row for layer, row in zip(report.layers, report.values.clone().cpu(), strict=True)
    }
    state = {shard.name: shard.data.clone().cpu() for shard in model.buffers}
    return rows | {f"{n.split('.')[1]}.{n.rpartition('.')[2]}": value for n, value in state.items()}


def batches(
    config: Config, rank: int, ranks: int, settings: Settings, device: torch.device = CPU
) -> Iterator[Batch]:
    """Yield the batches of data rank `rank` of `ranks` for `settings.steps` steps."""
    with contextlib.closing(every_batch(config, rank, ranks, device)) as every:
        for batch in itertools.islice(every, settings.steps):
            if settings.uneven:
                parts = config.train.seq_len // batch.labels.shape[1]
                before = rank * len(batch.labels)
                leave_out(batch, batch.first_sample - before // parts + before)
            if settings.twist.labels is not None:
                settings.twist.labels(batch.labels, rank)
            yield batch


def every_batch(
    config: Config, rank: int = 0, ranks: int = 1, device: torch.device = CPU
) -> Generator[Batch, None, None]:
    """Yield batches of data rank `rank` of `ranks` forever. Closing the generator closes its loader."""
    loader = Loader(
        build_dataset(config),
        global_batch_size=config.train.global_batch_size,
        rank=rank,
        ranks=ranks,
        start_sample=0,
        device=device,
        prefetch=1,
        plan_at=Phases(config).at,
    )
    try:
        yield from loader
    finally:
        loader.close()


def leave_out(batch: Batch, first: int) -> None:
    """Set some labels to IGNORE, in place, a different number in each row of `batch`.

    The choice depends only on the global index of the row. first: global index of the batch's first row. In a phase
    with shorter sequences, each sequence counts as a row.
    """
    rows, seq = batch.labels.shape
    for row in range(rows):
        number = first + row
        begin, width = (number * 29) % seq, 1 + (number * 13) % (seq // 3)
        batch.labels[row, begin : begin + width] = IGNORE


def _scalar(value: Tensor) -> TensorPiece:
    return TensorPiece(value.detach().clone().double().cpu(), ())
