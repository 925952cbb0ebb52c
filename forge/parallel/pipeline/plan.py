"""Stages and schedule of a configuration, decided on every rank alike before anything is built."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from forge import compat
from forge.config import Config, Degrees
from forge.config.pipeline import SPLIT_BACKWARD, number_of_stages
from forge.errors import UserError
from forge.parallel.pipeline.schedule import Schedule, make_schedule, read_schedule
from forge.parallel.pipeline.stages import Stage, layer_costs, make_stages, table

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PipelinePlan:
    """The stages of the whole pipeline and what every rank of the pp axis does with its own."""

    stages: list[Stage]
    schedule: Schedule

    def of_rank(self, rank: int) -> list[Stage]:
        """The stages of a rank of the pp axis, in the order of forward."""
        return [stage for stage in self.stages if self.schedule.rank_of[stage.index] == rank]

    @property
    def ends(self) -> tuple[int, int]:
        """The pp ranks of the first and the last stage."""
        return self.schedule.rank_of[0], self.schedule.rank_of[-1]


def plan_pipeline(config: Config, degrees: Degrees) -> PipelinePlan:
    """Raises UserError where only a schedule's CSV file shows what is wrong."""
    name, pp = config.pipeline.schedule, degrees.pp
    if name.endswith(".csv"):
        schedule = read_schedule(Path(name), pp, degrees.accumulation)
        _check_csv(config, len(schedule.rank_of))
    else:
        schedule = make_schedule(name, pp, number_of_stages(config), degrees.accumulation)
    stages = make_stages(config, len(schedule.rank_of))
    whole = whole_backward_because(config)
    if whole is not None:
        schedule = schedule.unsplit()
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
            "pipeline.schedule = %s: each backward stays in one piece (%s); idle time is as said above, and "
            "Interleaved1F1B may be no worse",
            name,
            whole,
        )
    return PipelinePlan(stages, schedule)


def whole_backward_because(config: Config) -> str | None:
    """Why the two halves of a backward cannot be computed apart; None if they can.

    A checkpoint would compute its block again for the input and for every weight by itself, a selective one refuses
    the second time; and a compiled block is one piece in backward, which would run as a whole for each.
    """
    if config.compile.enabled:
        return "compile.enabled: blocks would be computed again for every weight"
    if config.activation_checkpoint.mode != "none":
        return "activation_checkpoint: blocks would be computed again for every weight"
    if not compat.backward_starts_at_functions():
        return "this version of PyTorch cannot split it"
    return None


def _check_csv(config: Config, stages: int) -> None:
    wanted, key = number_of_stages(config), f"pipeline.schedule = {config.pipeline.schedule}"
    if wanted and wanted != stages:
        chosen = "module_names" if config.pipeline.module_names else "layers_per_stage"
        raise UserError(f"{key}: has {stages} stages, but pipeline.{chosen} makes {wanted}")
    if stages > config.model.n_layers and not config.pipeline.module_names:
        raise UserError(
            f"{key}: has {stages} stages, but there are only model.n_layers = {config.model.n_layers} layers"
        )
