"""`search`: from the layout of a config to better ones, one change at a time.

A layout is tried on two small models of a few layers for each stage; memory and time of the whole are extrapolated from
these, because equal layers add equal amounts. What cannot fit by its state alone is not tried.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any

from forge.config import Config, Degrees, check_world
from forge.config.checks import check
from forge.config.toml import to_literal
from forge.errors import UserError
from forge.model import parameter_counts
from forge.parallel.build import build_meta_model
from forge.parallel.precision import DTYPES
from forge.plan.estimate import Spent, StepTime
from forge.plan.hardware import Hardware
from forge.plan.plan import StagePlan, plan_stage, plannable
from forge.plan.speed import Speed, speed_of

Changes = dict[str, Any]
"""Values by key. Keys that do not differ from the config's are left out of the overrides."""
SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Found:
    """A layout that was tried: bytes of its worst rank by kind, as in `StagePlan`, and its estimated speed."""

    changes: Changes
    degrees: Degrees
    engine: str
    memory: dict[str, int]
    speed: Speed

    @property
    def needed(self) -> int:
        return self.memory["peak"] + self.memory["other"]

    @property
    def overrides(self) -> list[str]:
        return [f"--{key}={to_literal(value)}" for key, value in self.changes.items()]


def search(config: Config, world: int, hardware: Hardware, *, tries: int = 30) -> list[Found]:
    """Try up to `tries` layouts on `world` ranks; return those that fit, the fastest first.

    If none fits, return the one that needs least.
    """
    found: dict[str, Found | None] = {}
    expanded: set[str] = set()
    waiting = list(starts(config, hardware))
    parameters = parameter_counts(build_meta_model(config)).total

    def is_better(one: Found) -> tuple[bool, float]:
        fits = one.needed <= hardware.memory_bytes
        return (not fits, one.speed.step_s if fits else one.needed)

    while True:
        for changes in waiting:
            name = str(sorted(changes.items()))
            if name in found or sum(one is not None for one in found.values()) >= tries:
                continue
            found[name] = attempt(config, world, hardware, changes, parameters)
            if sys.stderr.isatty():
                print(f"\r{len(found)} layouts ", end="", file=sys.stderr, flush=True)
        tried = sorted((one for one in found.values() if one is not None), key=is_better)
        best = next((one for one in tried if str(sorted(one.changes.items())) not in expanded), None)
        if best is None or len(tried) >= tries:
            break
        expanded.add(str(sorted(best.changes.items())))
        waiting = list(neighbours(best.changes, config, hardware))
    if not tried:
        raise UserError(
            f"--search: no layout of this config is valid on {world} processes; see what --plan alone says"
        )
    fitting = [one for one in tried if one.needed <= hardware.memory_bytes]
    return fitting or tried[:1]


def starts(config: Config, hardware: Hardware) -> Iterator[Changes]:
    """Yield the config's own layout, and sharded ones of every tensor-parallel degree within a node."""
    yield {}
    for mode in ("none", "selective", "full"):
        for tp in (size for size in SIZES if size <= hardware.cards_per_node):
            yield {
                "parallel.data_parallel": "fsdp2",
                "parallel.tp": tp,
                "train.micro_batch_size": 1,
                "activation_checkpoint.mode": mode,
            }


def neighbours(changes: Changes, config: Config, hardware: Hardware) -> Iterator[Changes]:
    """Yield what differs from `changes` in one respect."""
    axes: dict[str, tuple[Any, ...]] = {
        "train.micro_batch_size": (1, 2, 4, 8),
        "activation_checkpoint.mode": ("none", "selective", "full"),
        "parallel.data_parallel": ("fsdp2", "zero1", "zero2"),
        "parallel.tp": tuple(size for size in SIZES if size <= hardware.cards_per_node),
        "parallel.pp": SIZES,
        "parallel.cp": (1, 2, 4),
        "parallel.dp_replicate": (1, 2, 4, 8),
    }
    if config.model.moe is not None:
        axes["parallel.ep"] = SIZES
    for key, values in axes.items():
        for value in values:
            yield changes | {key: value}
    if changes.get("parallel.pp", 1) > 1:
        for schedule in ("1F1B", "Interleaved1F1B"):
            yield changes | {"pipeline.schedule": schedule}


def attempt(
    config: Config, world: int, hardware: Hardware, changes: Changes, parameters: int
) -> Found | None:
    """Return memory and speed of the config with `changes`; None if it is invalid or cannot fit."""
    changes = {key: value for key, value in changes.items() if value != _value(config, key)}
    changed = with_changes(config, changes | {"parallel.dp_shard": -1})
    if config.parallel.dp_shard != -1:
        changes["parallel.dp_shard"] = -1
    try:
        degrees = check_world(changed, world)
    except UserError:
        return None
    if check(changed) or least_state(changed, degrees, parameters) > hardware.memory_bytes:
        return None
    try:
        memory, times = extrapolated(plannable(changed)[0], degrees, hardware)
    except UserError:
        return None
    speed = speed_of(plannable(changed)[0], degrees, times, hardware)
    return Found(changes, degrees, changed.parallel.data_parallel, memory, speed)


def least_state(config: Config, degrees: Degrees, parameters: int) -> float:
    """Return bytes that parameters, gradients and two moments take at least on a rank."""
    split = degrees.tp * degrees.pp * (degrees.ep if config.model.moe else 1)
    storage, compute = DTYPES[config.precision.storage].itemsize, DTYPES[config.precision.compute].itemsize
    whole = degrees.world // degrees.dp_replicate
    if config.parallel.data_parallel == "fsdp2":
        return parameters * 2 * storage / whole
    gradients = {"zero2": 4 / whole}.get(config.parallel.data_parallel, 4 / split)
    return parameters * (compute / split + gradients)


def extrapolated(
    config: Config, degrees: Degrees, hardware: Hardware
) -> tuple[dict[str, int], list[StepTime]]:
    """Return the memory of the worst rank and the time of every rank of the pp axis, from two smaller models.

    Raises UserError if the layers do not divide evenly among stages.
    """
    model = config.model
    dense = model.moe.n_dense_layers if model.moe else 0
    period = lcm(len(model.pattern), model.moe.every if model.moe else 1)
    stages = degrees.pp * (1 if degrees.pp == 1 or config.pipeline.schedule in ("GPipe", "1F1B") else 2)
    if degrees.pp > 1 and (dense or period > 1 or model.n_layers % stages or config.pipeline.module_names):
        raise UserError("the search splits equal layers evenly")
    # At least two, because FSDP treats the last block in another way than those before it.
    sizes = (dense + 2 * period, dense + 3 * period) if degrees.pp == 1 else (2 * stages, 3 * stages)
    small, large = (_stages_of(config, degrees, hardware, layers, layers // stages) for layers in sizes)
    steps = (model.n_layers - sizes[1]) / (sizes[1] - sizes[0])

    def whole(first: StagePlan, second: StagePlan) -> dict[str, int]:
        sizes = ((kind, first.memory[kind], second.memory[kind]) for kind in first.memory)
        return {kind: round(after + steps * (after - before)) for kind, before, after in sizes}

    # The ranks between the first and the last are like the first, without the embedding.
    memories = [whole(first, second) for first, second in zip(small, large, strict=True)]
    worst = max(memories, key=lambda memory: memory["peak"])
    times = [_combine(small[number].time, large[number].time, steps) for number in range(len(small))]
    return worst, [times[0]] * max(1, degrees.pp - 1) + times[1:]


def _stages_of(
    config: Config, degrees: Degrees, hardware: Hardware, layers: int, each: int
) -> list[StagePlan]:
    """The plans of the first and the last rank of the pp axis, for a model with fewer layers."""
    update: dict[str, Any] = {"model": config.model.model_copy(update={"n_layers": layers})}
    if degrees.pp > 1:
        update["pipeline"] = config.pipeline.model_copy(update={"layers_per_stage": each})
    smaller = config.model_copy(update=update)
    ranks = [0] if degrees.pp == 1 else [0, degrees.pp - 1]
    return [plan_stage(smaller, degrees, rank, hardware) for rank in ranks]


def _combine(small: StepTime | None, large: StepTime | None, steps: float) -> StepTime:
    assert small is not None and large is not None

    def whole(a: Spent, b: Spent) -> Spent:
        return Spent(
            *(
                max(0.0, getattr(b, name) + steps * (getattr(b, name) - getattr(a, name)))
                for name in ("compute", "waiting", "background")
            )
        )

    return StepTime(
        {number: whole(small.forward[number], large.forward[number]) for number in large.forward},
        {number: whole(small.backward[number], large.backward[number]) for number in large.backward},
        whole(small.update, large.update),
    )


def fewest_ranks(config: Config, world: int, hardware: Hardware, limit: int = 64) -> int | None:
    """Return the fewest ranks, in doublings of `world`, on which a search finds a layout that fits; None: beyond `limit`."""
    parameters = parameter_counts(build_meta_model(config)).total
    size = 2 * world
    while size <= limit * world:
        for changes in starts(config, hardware):
            found = attempt(config, size, hardware, changes, parameters)
            if found is not None and found.needed <= hardware.memory_bytes:
                return size
        size *= 2
    return None


def with_changes(config: Config, changes: Changes) -> Config:
    """Return `config` with other values for these keys, `section.key`."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        part = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: part})
    return config


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
