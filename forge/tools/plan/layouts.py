"""Layouts that a search may try: all that are legal, with a rough estimate that says in which order.

The estimate is arithmetic only: the operations and parameters of the model, the bytes that each axis sends, the bubble.
What a search prints comes from plans; the estimate decides which layouts are planned, and is corrected by them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from forge.config import Config, Degrees, check_world
from forge.config.checks import check
from forge.model import flops_per_token, parameter_counts
from forge.parallel.build import build_meta_model
from forge.parallel.precision import DTYPES
from forge.runtime.errors import UserError
from forge.tools.plan.collectives import Collective
from forge.tools.plan.hardware import Hardware
from forge.tools.plan.layers import few_layers
from forge.tools.plan.links import cost_of

Changes: TypeAlias = dict[str, Any]
"""Values by key. Keys that do not differ from the config's are left out."""
SIZES = (1, 2, 4, 8, 16, 32, 64)
MODES = ("none", "selective", "full")
# For each token and number of the residual stream: bytes that a layer keeps for backward, and bytes that its operators
# read and write in a step, as traced from Llama's shapes; operations of a step by those without recomputation.
KEPT = {"none": 77.0, "selective": 40.0, "full": 2.0}
TOUCHED = 500.0
COMPUTED = {"none": 1.0, "selective": 1.05, "full": 4 / 3}
# Collectives of a layer's two halves in forward, in backward, and again where forward is recomputed.
TENSOR_CALLS = {"none": 10, "selective": 12, "full": 14}


@dataclass(frozen=True)
class Layout:
    """A legal layout. seconds: a rough estimate of a step. state: bytes that a rank holds at least; activations: roughly.
    signature: what decides the shapes of a microbatch."""

    changes: Changes
    config: Config
    degrees: Degrees
    seconds: float
    state: float
    activations: float

    @property
    def signature(self) -> tuple[Any, ...]:
        d, config = self.degrees, self.config
        pipeline = config.pipeline.schedule if d.pp > 1 else ""
        return (d.tp, d.cp, d.ep, d.pp, config.train.micro_batch_size, self.mode, pipeline, self.engine)

    @property
    def mode(self) -> str:
        return self.config.activation_checkpoint.mode

    @property
    def engine(self) -> str:
        return self.config.parallel.data_parallel


@dataclass(frozen=True)
class Model:
    """Of the whole model: parameters, those of experts among them, operations per token of a step."""

    parameters: int
    experts: int
    flops: float

    @classmethod
    def of(cls, config: Config) -> Model:
        model = build_meta_model(config)
        experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        return cls(parameter_counts(model).total, experts, flops_per_token(model, config.train.seq_len))


def layouts(config: Config, world: int, hardware: Hardware, *, any_memory: bool = False) -> list[Layout]:
    """Return all legal layouts on `world` ranks whose state alone fits the hardware, the fastest by estimate first.

    The config's own layout is among them if it is legal. any_memory: also those whose state does not fit.
    """
    model, found = Model.of(config), {}
    for changes in _all_changes(config, world, hardware):
        changes = {key: value for key, value in changes.items() if value != value_of(config, key)}
        changed = with_changes(config, changes)
        try:
            degrees = check_world(changed, world)
        except UserError:
            continue
        state = least_state(changed, degrees, model)
        if (state > hardware.memory_bytes and not any_memory) or check(changed):
            continue
        if degrees.pp > 1 and not _even(changed, degrees):
            continue
        seconds = rough_seconds(changed, degrees, hardware, model)
        activations = rough_activations(changed, degrees)
        found[str(sorted(changes.items()))] = Layout(changes, changed, degrees, seconds, state, activations)
    return sorted(found.values(), key=lambda layout: layout.seconds)


def _all_changes(config: Config, world: int, hardware: Hardware) -> Iterator[Changes]:
    yield {}
    tp = [size for size in SIZES if size <= hardware.cards_per_node]
    ep = SIZES if config.model.moe is not None else (1,)
    micro = [size for size in SIZES[:4] if config.train.global_batch_size % size == 0]
    engines = dict.fromkeys((config.parallel.data_parallel, "fsdp2", "zero1", "zero2"))
    for pp, cp, t, e, replicate in itertools.product(SIZES[:5], SIZES[:3], tp, ep, SIZES):
        if world % (pp * cp * t * replicate) or config.train.global_batch_size % (world // (pp * cp * t)):
            continue
        for engine, mode, size in itertools.product(engines, MODES, micro):
            changes = {
                "parallel.dp_shard": -1,
                "parallel.pp": pp,
                "parallel.cp": cp,
                "parallel.tp": t,
                "parallel.ep": e,
                "parallel.dp_replicate": replicate,
                "parallel.data_parallel": engine,
                "activation_checkpoint.mode": mode,
                "train.micro_batch_size": size,
            }
            if config.model.moe is None:
                del changes["parallel.ep"]
            if pp == 1:
                yield changes
                continue
            for schedule in ("1F1B", "Interleaved1F1B"):
                yield changes | {"pipeline.schedule": schedule}


def _even(config: Config, degrees: Degrees) -> bool:
    stages = degrees.pp * (1 if config.pipeline.schedule == "1F1B" else 2)
    return not config.model.n_layers % stages and isinstance(config.pipeline.layers_per_stage, int)


def traceable(layout: Layout) -> bool:
    """Whether a plan need not trace all layers of a deep model."""
    return layout.config.model.n_layers <= 8 or few_layers(layout.config, layout.degrees) is not None


def least_state(config: Config, degrees: Degrees, model: Model) -> float:
    """Return bytes that parameters, gradients and optimizer state take at least on a rank."""
    split, parallel = degrees.tp * degrees.pp, config.parallel
    # Experts are divided among ep ranks, of which tp ranks are some.
    held = (model.parameters - model.experts) / split + model.experts / (degrees.pp * max(degrees.ep, 1))
    storage, compute = DTYPES[config.precision.storage].itemsize, DTYPES[config.precision.compute].itemsize
    shards = degrees.dp_shard * degrees.cp
    state = {"adamw": 2, "lion": 1, "muon": 1}.get(config.optimizer.name, 0)
    state *= {"float32": 4, "bfloat16": 2}.get(config.optimizer.moment_dtype, 1)
    # Of experts the ranks that share one are at least the others divided by ep.
    spread = model.parameters / (degrees.world / degrees.dp_replicate)
    if parallel.data_parallel == "fsdp2":
        return spread * (2 * storage + state)
    if parallel.data_parallel == "ddp":
        return held * (compute + 4 + state)
    whole = compute + (4 if parallel.data_parallel == "zero1" else 4 / shards)
    return held * whole + spread * state


def rough_activations(config: Config, degrees: Degrees) -> float:
    """Return about how many bytes a rank keeps for backward."""
    train, model, mode = config.train, config.model, config.activation_checkpoint.mode
    numbers = train.micro_batch_size * train.seq_len / (degrees.cp * degrees.tp) * model.dim
    in_flight = min(degrees.pp, degrees.accumulation) / degrees.pp
    if degrees.pp > 1 and config.pipeline.schedule != "1F1B":
        in_flight *= 1.5
    layer = numbers * KEPT["none"] * (degrees.tp if mode == "full" else 1)  # one that is recomputed
    return KEPT.get(mode, 77.0) * numbers * model.n_layers * in_flight + layer


def rough_seconds(config: Config, degrees: Degrees, hardware: Hardware, model: Model) -> float:
    """Return about how long a step takes."""
    d, train, dim, mode = degrees, config.train, config.model.dim, config.activation_checkpoint.mode
    peak = hardware.peak_flops(config.precision.compute) or hardware.peak_flops("bfloat16") or 1e12
    tokens = train.global_batch_size * train.seq_len / d.world
    numbers = tokens * dim * config.model.n_layers
    compute = COMPUTED.get(mode, 1.0) * (
        model.flops * tokens / (peak * hardware.efficiency)
        + TOUCHED * numbers / (hardware.memory_gb_per_s * 1e9 * hardware.memory_efficiency)
    )
    width, reduce = DTYPES[config.precision.compute].itemsize, DTYPES[config.precision.reduce].itemsize
    microbatch = train.micro_batch_size * train.seq_len // d.cp * dim * width
    layers = config.model.n_layers / d.pp * d.accumulation

    def seconds(kind: str, size: float, first: int, number: int) -> float:
        ranks = [first * rank for rank in range(number)]
        return cost_of(Collective(kind, int(size)), ranks, hardware).seconds

    tensor = layers * TENSOR_CALLS.get(mode, 10) * seconds("all_gather", microbatch, 1, d.tp)
    keys = 2 * config.model.n_kv_heads / config.model.n_heads
    context = layers * 3 * seconds("all_gather", microbatch * d.cp * keys / d.tp, d.tp, d.cp)
    experts = 0.0
    if config.model.moe is not None:
        sent = microbatch * config.model.moe.top_k / d.tp
        experts = layers * 4 * seconds("all_to_all", sent, 1, d.ep)
    held = (model.parameters - model.experts) / (d.tp * d.pp) + model.experts / (d.pp * d.ep)
    shards = d.dp_shard * d.cp
    gather = seconds("all_gather", held * width, d.tp, shards)
    scatter = seconds("reduce_scatter", held * reduce, d.tp, shards)
    copies = seconds("all_reduce", held / shards * reduce, d.tp * shards, d.dp_replicate)
    times = d.accumulation if d.pp == 1 else 1
    if config.parallel.data_parallel == "fsdp2":
        data = times * (gather * (2 if d.pp == 1 else 1) + scatter) + copies
    else:
        data = gather + copies + scatter * (times if config.parallel.data_parallel == "zero2" else 1)
    stages = 1 if config.pipeline.schedule == "1F1B" else 2
    bubble = (d.pp - 1) / (d.accumulation * stages)
    return max(compute + tensor + context + experts, data) * (1 + bubble)


def with_changes(config: Config, changes: Changes) -> Config:
    """Return `config` with other values for these keys, `section.key`."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        part = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: part})
    return config


def value_of(config: Config, key: str) -> Any:
    """Return the value of `section.key` in `config`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
