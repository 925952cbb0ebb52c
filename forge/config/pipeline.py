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
        stages = -(-config.model.n_layers // chosen.layers_per_stage)
        rounded = {"up": -(-stages // parallel.pp), "down": stages // parallel.pp}.get(chosen.round)
        return stages if rounded is None else rounded * parallel.pp
    if chosen.schedule.endswith(".csv"):
        return 0
    return parallel.pp if chosen.schedule in ONE_PER_RANK else 2 * parallel.pp


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
    if (names or layers_per_stage) and not schedule.endswith(".csv"):
        per_rank = 1 if schedule in ONE_PER_RANK else 2
        several = schedule not in ONE_PER_RANK + V_SHAPED
        fits = stages % pp == 0 and stages >= 2 * pp if several else stages == per_rank * pp
        if not fits:
            need = f"a multiple of parallel.pp = {pp}, at least {2 * pp}" if several else f"{per_rank * pp}"
            remedy = f"use {max(1, -(-layers // (per_rank * pp)))}"
            if several and stages % pp and config.pipeline.round == "error":
                remedy += ", or pipeline.round = up or down"
            key = "pipeline.module_names" if names else "pipeline.layers_per_stage"
            yield Problem(
                (key, "pipeline.schedule", "parallel.pp", "model.n_layers"),
                f"makes {stages} stages, but pipeline.schedule = {schedule} with parallel.pp = {pp} takes {need}; "
                f"{'list that many' if names else remedy}",
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
