"""How many stages a pipeline has, and how many microbatches its schedule needs: arithmetic on what the user said.

A stage is a run of layers that lie on one rank of the pp axis. GPipe and 1F1B have one stage per rank; the looped
schedules deal out several in turns (stage s to rank s mod pp); the V-shaped ones give rank r the stages r and 2 pp - 1 - r.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from forge.config.messages import Problem
from forge.config.schema import Config

ONE_PER_RANK = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
# Input gradients travel on before the weights' gradients are computed.
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
# The order of microbatches goes in rounds of about pp.
IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")


def number_of_stages(config: Config) -> int:
    """Stages of the whole pipeline; 0 where only the schedule's CSV file knows."""
    parallel, chosen = config.parallel, config.pipeline
    if chosen.module_names:
        return len(chosen.module_names)
    if chosen.layers_per_stage:
        return _stages_of(config, chosen.layers_per_stage, chosen.round)
    if chosen.schedule.endswith(".csv"):
        return 0
    return parallel.pp if chosen.schedule in ONE_PER_RANK else 2 * parallel.pp


def _stages_of(config: Config, layers_per_stage: int, rounding: str) -> int:
    stages, pp = -(-config.model.n_layers // layers_per_stage), config.parallel.pp
    rounded = {"up": -(-stages // pp), "down": stages // pp}.get(rounding)
    return stages if rounded is None else rounded * pp


def module_order(config: Config) -> list[str]:
    """What `pipeline.module_names` deals out, in the order of forward; a tied head goes with the norm."""
    layers = [f"layers.{layer}" for layer in range(config.model.n_layers)]
    return ["embedding", *layers, "norm", *([] if config.model.tie_embeddings else ["head"])]


def check_stages(config: Config) -> Iterator[Problem]:
    """Why the stages that are asked for cannot be made."""
    pp, schedule, layers = config.parallel.pp, config.pipeline.schedule, config.model.n_layers
    names, layers_per_stage = config.pipeline.module_names, config.pipeline.layers_per_stage
    stages = number_of_stages(config)
    if pp == 1:
        return
    if names and layers_per_stage:
        text = "is a split, and pipeline.module_names is another; leave one out"
        yield Problem(("pipeline.layers_per_stage", "pipeline.module_names"), text)
        return
    if (names or layers_per_stage) and not schedule.endswith(".csv") and not _takes(config, stages):
        several, few = schedule not in ONE_PER_RANK + V_SHAPED, _fewest_stages(config)
        need = f"a multiple of parallel.pp = {pp}, at least {few}" if several else f"{few}"
        remedy = "list that many" if names else _remedy(config)
        key = "pipeline.module_names" if names else "pipeline.layers_per_stage"
        yield Problem(
            (key, "pipeline.schedule", "parallel.pp", "model.n_layers"),
            f"makes {stages} stages of model.n_layers = {layers} layers, but pipeline.schedule = {schedule} with "
            f"parallel.pp = {pp} takes {need}; {remedy}",
        )
        return
    if names:
        yield from _check_names(config)
    elif stages > layers:
        yield Problem(
            ("parallel.pp", "pipeline.schedule", "model.n_layers"),
            f"makes {stages} stages with pipeline.schedule = {schedule}, but there are only model.n_layers = {layers} "
            "layers; use fewer ranks, or GPipe or 1F1B, which have one stage per rank",
        )


def _fewest_stages(config: Config) -> int:
    return config.parallel.pp * (1 if config.pipeline.schedule in ONE_PER_RANK else 2)


def _takes(config: Config, stages: int) -> bool:
    """Whether the schedule works with so many stages, each of which has a layer unless modules are dealt out by hand."""
    fewest, pp = _fewest_stages(config), config.parallel.pp
    if stages > config.model.n_layers and not config.pipeline.module_names:
        return False
    if config.pipeline.schedule in ONE_PER_RANK + V_SHAPED:
        return stages == fewest
    return stages % pp == 0 and stages >= fewest


def _remedy(config: Config) -> str:
    """What to write for pipeline.layers_per_stage, or beside it, instead."""
    chosen, layers = config.pipeline, config.model.n_layers
    if _fewest_stages(config) > layers:
        return "use fewer ranks"
    sizes = [n for n in range(1, layers + 1) if _takes(config, _stages_of(config, n, chosen.round))]
    rounds = [r for r in ("up", "down") if _takes(config, _stages_of(config, chosen.layers_per_stage, r))]
    remedies = [f"use {min(sizes, key=lambda n: abs(n - chosen.layers_per_stage))}"] if sizes else []
    remedies += [f"pipeline.round = {' or '.join(rounds)}"] if rounds else []
    return ", or ".join(remedies or ["use 0, for a split as even as can be"])


def _check_names(config: Config) -> Iterator[Problem]:
    key = ("pipeline.module_names",)
    expected, stages = module_order(config), config.pipeline.module_names
    given = [name for stage in stages for name in stage]
    for seen, wanted in zip_longest(given, expected):
        if seen != wanted:
            yield Problem(
                key,
                f"must have every module once and in order ({expected[0]}, layers.0, ..., {', '.join(expected[-2:])}): "
                f"has {_quoted(seen)} where {_quoted(wanted)} belongs",
            )
            return
    if not all(stages):
        yield Problem(key, "has a stage without modules; leave it out")
    if "head" in expected and "norm" not in stages[-1]:
        yield Problem(key, "must keep norm and head in one stage, the last")


def _quoted(name: str | None) -> str:
    return "the end" if name is None else f'"{name}"'


def check_microbatches(config: Config, microbatches: int) -> str | None:
    """Why the schedule cannot work with so many microbatches per optimizer step, with the number it needs."""
    schedule, pp = config.pipeline.schedule, config.parallel.pp
    if pp == 1 or schedule.endswith(".csv"):
        return None
    needed = {"GPipe": 1, "LoopedBFS": 1, "DualPipeV": 2 * pp}.get(schedule, pp)
    remedy = (
        "raise train.global_batch_size, or lower train.micro_batch_size or the number of data-parallel ranks"
    )
    if microbatches < needed:
        return (
            f"pipeline.schedule = {schedule}: needs at least {needed} microbatches per optimizer step with parallel.pp = "
            f"{pp}, but there {'is 1' if microbatches == 1 else f'are {microbatches}'}; {remedy}"
        )
    if schedule in IN_ROUNDS and not _in_rounds(microbatches, pp):
        near = [
            next(n for n in range(microbatches, 0, -1) if _in_rounds(n, pp)),
            next(n for n in range(microbatches, 2 * microbatches + pp) if _in_rounds(n, pp)),
        ]
        return (
            f"pipeline.schedule = {schedule}: goes in microbatches / pp rounds of equal size, but {microbatches} // {pp} = "
            f"{microbatches // pp} does not divide {microbatches}; make it {near[0]} or {near[1]} microbatches per "
            f"optimizer step with train.global_batch_size or train.micro_batch_size"
        )
    return None


def _in_rounds(microbatches: int, pp: int) -> bool:
    return microbatches % max(1, microbatches // pp) == 0
