"""The layers of each pipeline stage, and the schedule. Every rank computes the same plan before the model is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from operator import add
from pathlib import Path

import torch

from forge.config import Config, Degrees
from forge.config.pipeline import SPLIT_BACKWARD, number_of_stages
from forge.model import build_model, flops_per_token
from forge.parallel.pipeline.schedule import Schedule, make_schedule, read_schedule
from forge.runtime import compat
from forge.runtime.causes import Cause
from forge.runtime.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """Consecutive layers (global indices). embed: the embedding precedes the layers. head: norm and head follow them."""

    index: int
    layers: range
    embed: bool
    head: bool

    def __str__(self) -> str:
        layers = f"layers {self.layers[0]}-{self.layers[-1]}" if len(self.layers) > 1 else ""
        layers = f"layer {self.layers[0]}" if len(self.layers) == 1 else layers
        return ", ".join(
            part for part in ("embedding" * self.embed, layers, "norm and head" * self.head) if part
        )


@dataclass(frozen=True)
class PipelinePlan:
    """All stages of the pipeline, and the schedule."""

    stages: list[Stage]
    schedule: Schedule
    with_microbatches: Callable[[int], Schedule]
    """Returns this schedule for another number of microbatches."""

    def of_rank(self, rank: int) -> list[Stage]:
        """Return the stages of pp rank `rank`, in the order of forward."""
        return [stage for stage in self.stages if self.schedule.rank_of[stage.index] == rank]

    @property
    def ends(self) -> tuple[int, int]:
        """Return the pp ranks of the first and the last stage."""
        return self.schedule.rank_of[0], self.schedule.rank_of[-1]


def plan_pipeline(config: Config, degrees: Degrees) -> PipelinePlan:
    """Return the stages and the schedule, and log them.

    Raises UserError for mistakes in a schedule's CSV file. The configuration's checks have found all other mistakes.
    """
    name, pp, whole = config.pipeline.schedule, degrees.pp, whole_backward_because(config)

    @cache
    def with_microbatches(number: int) -> Schedule:
        if name.endswith(".csv"):
            made = read_schedule(Path(name), pp, number)
            _check_csv(config, len(made.rank_of))
        else:
            made = make_schedule(name, pp, number_of_stages(config), number)
        if whole is not None:
            made = made.unsplit()
        elif config.model.mtp is not None:
            # With multi-token prediction, the embedding's gradient has several paths through the last stage, some not
            # through the stage's input. PyTorch's split backward would run the part shared by these paths twice.
            made = made.unsplit({len(made.rank_of) - 1})
        _refuse_freed_parameters(config, made)
        return made

    schedule = with_microbatches(degrees.accumulation)
    stages = make_stages(config, len(schedule.rank_of))
    log.info(
        "pipeline of %d stages, schedule %s, %d microbatches: idle %.1f %% of the time if stages cost the same\n%s",
        len(stages),
        name,
        schedule.microbatches,
        100 * schedule.bubble,
        table(stages, layer_costs(config), schedule.rank_of),
    )
    if name in SPLIT_BACKWARD and whole is not None:
        log.warning(
            "pipeline.schedule = %s: backward is not split into input and weight gradients (%s). The logged idle time "
            "takes this into account; Interleaved1F1B may be as fast",
            name,
            whole,
            extra=Cause.NOTE.mark,
        )
    return PipelinePlan(stages, schedule, with_microbatches)


def whole_backward_because(config: Config) -> str | None:
    """Return the reason why backward cannot be split into input and weight gradients; None if it can be split.

    A checkpointed block would be recomputed for the input and again for every weight, and selective checkpointing
    raises at a second recomputation. The backward of a compiled block cannot be split: it would run as a whole each
    time.
    """
    if config.compile.enabled:
        return "compile.enabled = true: the backward of a compiled block runs only as a whole"
    if config.activation_checkpoint.mode not in ("none", "offload"):
        return "activation_checkpoint.mode: a block would be recomputed again for each weight"
    if not compat.backward_starts_at_functions():
        return "this version of PyTorch cannot split backward"
    return None


def _check_csv(config: Config, stages: int) -> None:
    wanted, key = number_of_stages(config), f"pipeline.schedule = {config.pipeline.schedule}"
    if wanted and wanted != stages:
        raise UserError(f"{key}: has {stages} stages, but pipeline.layers_per_stage makes {wanted}")
    if stages > config.model.n_layers and not isinstance(config.pipeline.layers_per_stage, tuple):
        raise UserError(
            f"{key}: has {stages} stages, but there are only model.n_layers = {config.model.n_layers} layers"
        )


def _refuse_freed_parameters(config: Config, schedule: Schedule) -> None:
    """Raise UserError if FSDP2 would free parameters before W. The configuration's checks know only named schedules."""
    parallel, split = config.parallel, any(action.kind == "I" for order in schedule.order for action in order)
    if (
        split
        and parallel.data_parallel == "fsdp2"
        and parallel.reshard_after_forward not in ("auto", "never")
    ):
        raise UserError(
            f"parallel.reshard_after_forward = {parallel.reshard_after_forward}: would free parameters before "
            f"pipeline.schedule = {config.pipeline.schedule} computes their gradients; use auto or never"
        )


@dataclass(frozen=True)
class Costs:
    """Multiply-adds of a forward per token: one number for each layer, one for the embedding, one for norm and head."""

    layers: tuple[int, ...]
    embedding: int
    head: int

    def of(self, stage: Stage) -> int:
        ends = self.embedding * stage.embed + self.head * stage.head
        return sum(self.layers[layer] for layer in stage.layers) + ends


def make_stages(config: Config, stages: int = 0) -> list[Stage]:
    """Divide the layers among stages. stages: number of stages, read only if the configuration does not determine it."""
    chosen, n_layers = config.pipeline.layers_per_stage, config.model.n_layers
    if isinstance(chosen, tuple):
        counts = list(chosen)
    elif chosen:
        counts = split_evenly(n_layers, number_of_stages(config))
    else:
        counts = split_by_cost(layer_costs(config), number_of_stages(config) or stages)
    return [
        Stage(index, range(end - count, end), embed=index == 0, head=index == len(counts) - 1)
        for index, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True))
    ]


def split_evenly(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage. The numbers differ by at most 1, in descending order."""
    return [layers // stages + (index < layers % stages) for index in range(stages)]


def split_by_cost(costs: Costs, stages: int) -> list[int]:
    """Return the number of layers of each stage, at least 1, such that the most expensive stage costs least.

    Among equally good splits, return the most even (smallest sum of squared costs). If several remain, return the split
    with more layers in the first stages.
    """
    n_layers = len(costs.layers)
    assert 1 <= stages <= n_layers
    before = [0, *accumulate(costs.layers)]

    def cost_of(index: int, begin: int, end: int) -> int:
        ends = costs.embedding * (index == 0) + costs.head * (index == stages - 1)
        return before[end] - before[begin] + ends

    def best(
        price: Callable[[int], float], total_of: Callable[[float, float], float]
    ) -> tuple[float, list[int]]:
        """Return the cheapest split: its total price, and the end of each stage (its last layer plus 1).

        price: maps the cost of a stage to its price. total_of: combines the prices of stages, e.g. to their maximum.
        Uses dynamic programming from the last stage backwards.
        """

        @cache
        def rest(index: int, begin: int) -> tuple[float, list[int]]:
            """Return the cheapest split of the layers from `begin` over the stages from number `index`."""
            if index == stages - 1:
                return price(cost_of(index, begin, n_layers)), [n_layers]
            totals = {
                end: total_of(price(cost_of(index, begin, end)), rest(index + 1, end)[0])
                for end in range(n_layers - (stages - index - 1), begin, -1)
            }
            # Ends are in descending order, so among equal totals min returns the split with more layers in this stage.
            end = min(totals, key=totals.__getitem__)
            return totals[end], [end, *rest(index + 1, end)[1]]

        return rest(0, 0)

    # First find the smallest possible maximum, then the most even split within it.
    limit, _ = best(lambda cost: cost, max)
    _, ends = best(lambda cost: cost * cost if cost <= limit else inf, add)
    return [end - begin for begin, end in pairwise([0, *ends])]


def layer_costs(config: Config) -> Costs:
    """Return the cost of each layer, from the modules of the model on the meta device.

    The embedding counts as an eighth of the head's matrix product. It multiplies nothing, but it moves as much memory
    as the head, and its gradient is as large as the head's.
    """
    seq_len = config.train.seq_len
    with torch.device("meta"):
        model = build_model(config.model, seq_len)
    # A multiply-add of the forward is six FLOPs: two in forward and four in backward.
    blocks = list(model.layers.values())[: config.model.n_layers]
    layers = [round(flops_per_token(layer, seq_len) / 6) for layer in blocks]
    # The blocks of multi-token prediction are on the last stage and count as part of the head.
    head = round(flops_per_token(model, seq_len) / 6) - sum(layers)
    return Costs(tuple(layers), embedding=config.model.vocab_size * config.model.dim // 8, head=head)


def table(stages: Sequence[Stage], costs: Costs, rank_of: Sequence[int]) -> str:
    """Return a table with one line per stage: rank, share of the work, layers."""
    work = [costs.of(stage) for stage in stages]
    rows = [
        f"  stage {stage.index:>2}  pp rank {rank_of[stage.index]:>2}  {share / sum(work):>6.1%} of the work  {stage}"
        for stage, share in zip(stages, work, strict=True)
    ]
    return "\n".join(rows)
