"""The stages and microbatches of a pipeline: arithmetic on the configuration.

A stage is a range of consecutive layers on one pp rank. GPipe and 1F1B have one stage per rank. Looped schedules assign
several stages to each rank in turn: stage s is on rank s mod pp. V-shaped schedules assign stages r and 2 pp - 1 - r to
rank r.
"""

from __future__ import annotations

from collections.abc import Iterator

from forge.config.problem import Problem, problem
from forge.config.schema import Config

ONE_PER_RANK = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
# These schedules compute and send input gradients first, and compute weight gradients later.
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
# These schedules order microbatches in rounds of about pp microbatches.
IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")


def number_of_stages(config: Config) -> int:
    """Return the number of stages of the whole pipeline; 0 if only the schedule's CSV file determines the number."""
    chosen = config.pipeline.layers_per_stage
    if isinstance(chosen, tuple):
        return len(chosen)
    if chosen:
        return _stages_of(config, chosen, config.pipeline.round)
    return 0 if config.pipeline.schedule.endswith(".csv") else _fewest_stages(config)


def _stages_of(config: Config, layers_per_stage: int, rounding: str) -> int:
    stages, pp = -(-config.model.n_layers // layers_per_stage), config.parallel.pp
    rounded = {"up": -(-stages // pp), "down": stages // pp}.get(rounding)
    return stages if rounded is None else rounded * pp


def _fewest_stages(config: Config) -> int:
    return config.parallel.pp * (1 if config.pipeline.schedule in ONE_PER_RANK else 2)


def _accepts(config: Config, stages: int) -> bool:
    """Return whether the schedule works with `stages` stages.

    Each stage must have a layer, unless pipeline.layers_per_stage is a list.
    """
    fewest, pp = _fewest_stages(config), config.parallel.pp
    if stages > config.model.n_layers and not isinstance(config.pipeline.layers_per_stage, tuple):
        return False
    if config.pipeline.schedule in ONE_PER_RANK + V_SHAPED:
        return stages == fewest
    return stages % pp == 0 and stages >= fewest


def check_stages(config: Config) -> Iterator[Problem]:
    """Yield the reasons why the requested stages are impossible."""
    pp, layers, chosen = config.parallel.pp, config.model.n_layers, config.pipeline.layers_per_stage
    stages, fewest, schedule = number_of_stages(config), _fewest_stages(config), config.pipeline.schedule
    key, others = "pipeline.layers_per_stage", ("pipeline.schedule", "parallel.pp", "model.n_layers")
    if pp == 1:
        return
    if chosen and not schedule.endswith(".csv") and not _accepts(config, stages):
        fixed = schedule in ONE_PER_RANK + V_SHAPED
        need = f"{fewest}" if fixed else f"a multiple of {pp}, at least {fewest}"
        made = f"splits model.n_layers = {layers} layers into {stages} stage{'s' if stages > 1 else ''}"
        taken = f"pipeline.schedule = {schedule} with parallel.pp = {pp} needs {need}"
        yield problem(key, f"{made}, but {taken}", _remedy(config), *others)
    elif isinstance(chosen, tuple):
        if sum(chosen) != layers:
            total = f"adds up to {sum(chosen)} layers, but model.n_layers = {layers}"
            yield problem(key, total, "count each layer once", "model.n_layers")
        if not all(chosen[1:-1]):
            yield problem(key, "has an empty stage between the first and the last", "leave it out")
    elif stages > layers:
        many = f"needs {stages} stages with pipeline.schedule = {schedule}"
        few = f"the model has only model.n_layers = {layers} layers"
        remedy = "use fewer ranks, or set pipeline.schedule = GPipe or 1F1B, which have one stage per rank"
        yield problem("parallel.pp", f"{many}, but {few}", remedy, *others)


def _remedy(config: Config) -> str:
    """Suggest valid values of pipeline.layers_per_stage and pipeline.round."""
    chosen, layers = config.pipeline.layers_per_stage, config.model.n_layers
    if isinstance(chosen, tuple):
        return "list that many stages"
    if _fewest_stages(config) > layers:
        return "use fewer ranks"
    rounding = config.pipeline.round
    sizes = [n for n in range(1, layers + 1) if _accepts(config, _stages_of(config, n, rounding))]
    rounds = [r for r in ("up", "down") if _accepts(config, _stages_of(config, chosen, r))]
    remedies = [f"use {min(sizes, key=lambda n: abs(n - chosen))}"] if sizes else []
    remedies += [f"set pipeline.round = {' or '.join(rounds)}"] if rounds else []
    return ", or ".join(remedies or ["use 0, which splits as evenly as possible"])


def check_microbatches(config: Config, microbatches: int) -> Iterator[Problem]:
    """Yield the reasons why the schedule is impossible with `microbatches` microbatches per optimizer step."""
    schedule, pp = config.pipeline.schedule, config.parallel.pp
    if pp == 1 or schedule.endswith(".csv"):
        return
    needed = {"GPipe": 1, "LoopedBFS": 1, "DualPipeV": 2 * pp}.get(schedule, pp)
    if microbatches < needed:
        few = f"at least {needed} microbatches per optimizer step with parallel.pp = {pp}"
        remedy = "raise train.global_batch_size, or lower train.micro_batch_size or the number of data-parallel ranks"
        yield problem("pipeline.schedule", f"needs {few}, but a step has {microbatches}", remedy)
    elif schedule in IN_ROUNDS and not _in_rounds(microbatches, pp):
        below = next(n for n in range(microbatches, 0, -1) if _in_rounds(n, pp))
        above = next(n for n in range(microbatches, 2 * microbatches + pp) if _in_rounds(n, pp))
        number = f"{microbatches} // parallel.pp = {microbatches} // {pp} = {microbatches // pp}"
        rounds = f"needs rounds of equal size, but {microbatches} microbatches per step do not divide into {number} rounds"
        remedy = "change train.global_batch_size or train.micro_batch_size"
        yield problem("pipeline.schedule", rounds, f"{remedy} for {below} or {above} microbatches per step")


def _in_rounds(microbatches: int, pp: int) -> bool:
    return microbatches % max(1, microbatches // pp) == 0
