"""`layouts`: the legal layouts for a search, ordered by a rough estimate of their speed.

The estimate is arithmetic on the model's FLOPs and parameters, the bytes sent by each axis, and the bubble. Estimates only
choose the layouts to plan, and each plan corrects later estimates. A search prints numbers from plans only.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from forge.config import Config, Degrees, check_world
from forge.config.checks import check
from forge.config.patterns import names_layers
from forge.model import flops_per_token, parameter_counts
from forge.parallel.build import build_meta_model
from forge.parallel.precision import DTYPES
from forge.runtime.errors import UserError
from forge.tools.plan.collectives import Collective
from forge.tools.plan.estimate import FUSED
from forge.tools.plan.hardware import Hardware
from forge.tools.plan.layers import few_layers, with_experts_first
from forge.tools.plan.links import cost_of, visited_nodes

Changes: TypeAlias = dict[str, Any]
"""Overrides of a layout: `section.key` -> value."""
RESHARD, DEFER = "parallel.reshard_after_forward", "parallel.defer_gradient_reduction"
SIZES = (1, 2, 4, 8, 16, 32, 64)
MODES = ("none", "selective", "full", "offload")
# Largest number of layouts in a search. In addition, the fastest PLAIN plain layouts and the fastest PLAIN other simple
# layouts of each recomputation mode are kept.
MOST, PLAIN = 400, 3
# Assumed upper bound of the ratio (estimated activations) / (planned activations).
DOUBT = 2.0
# Smallest number of tokens of a sequence on a cp rank, unless the batch has too few sequences for data parallelism.
SHORTEST = 8192
# Pipeline stages may have unequal numbers of layers only if each has at least this many layers.
UNEVEN = 3
# Numbers per layer, token and element of the residual stream, traced from Llama's shapes. KEPT: bytes kept for
# backward. TOUCHED: bytes read and written by operators in a step. COMPUTED: FLOPs of a step relative to those without
# recomputation.
KEPT = {"none": 41.0, "selective": 25.0, "full": 2.0, "offload": 0.0}
TOUCHED = 280.0
COMPUTED = {"none": 1.0, "selective": 1.05, "full": 4 / 3, "offload": 1.0}
# Collectives of tensor parallelism per layer and microbatch: forward, backward and the recomputed forward.
TENSOR_CALLS = {"none": 10, "selective": 12, "full": 14, "offload": 10}
# All-to-alls of expert parallelism per layer and microbatch. Selective recomputation keeps their results.
EXPERT_CALLS = {"none": 4, "selective": 4, "full": 6, "offload": 4}


@dataclass(frozen=True)
class CandidateLayout:
    """A layout with rough estimates. seconds: of a step. activations: bytes. state: bytes, a lower bound.

    Planned layouts correct the estimates of layouts with an equal key. There are three keys, from general to specific.
    `sizes` has the degrees and the micro batch size. `shapes` adds the recomputation mode and engine. `signature` adds
    the schedule.
    """

    changes: Changes
    config: Config
    degrees: Degrees
    seconds: float
    state: float
    activations: float

    @property
    def sizes(self) -> tuple[int, ...]:
        d = self.degrees
        return d.tp, d.cp, d.ep, d.pp, self.config.train.micro_batch_size

    @property
    def shapes(self) -> tuple[Any, ...]:
        parallel = self.config.parallel
        engine = self.engine, parallel.reshard_after_forward, parallel.defer_gradient_reduction
        return (*self.sizes, self.mode, *engine)

    @property
    def schedule(self) -> str:
        """The pipeline schedule; empty without a pipeline."""
        return self.config.pipeline.schedule if self.degrees.pp > 1 else ""

    @property
    def signature(self) -> tuple[Any, ...]:
        return self.shapes, self.schedule

    @property
    def mode(self) -> str:
        return self.config.activation_checkpoint.mode

    @property
    def engine(self) -> str:
        return self.config.parallel.data_parallel

    @property
    def is_simple(self) -> bool:
        """Whether the layout is FSDP2 with default settings, without a pipeline and without replicas."""
        d, parallel = self.degrees, self.config.parallel
        frees = parallel.reshard_after_forward != "never" and not parallel.defer_gradient_reduction
        return self.engine == "fsdp2" and frees and d.pp == d.dp_replicate == 1

    @property
    def is_plain(self) -> bool:
        """Whether the layout is simple and without cp or tp: FSDP2, with or without ep. A search tries these first."""
        return self.is_simple and self.degrees.cp == self.degrees.tp == 1


@dataclass(frozen=True)
class Model:
    """Totals of the whole model. flops: FLOPs of forward and backward, per token.

    parameters: number of parameters, including routed experts. experts: number of parameters in routed experts.
    """

    parameters: int
    experts: int
    flops: float

    @classmethod
    def of(cls, config: Config) -> Model:
        model = build_meta_model(config)
        experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        return cls(parameter_counts(model).total, experts, flops_per_token(model, config.train.seq_len))


def layouts(
    config: Config,
    world: int,
    hardware: Hardware,
    *,
    any_memory: bool = False,
    allowed: Callable[[Changes], bool] = lambda changes: True,
) -> list[CandidateLayout]:
    """Return the legal layouts on `world` ranks that may fit the hardware, by increasing estimated seconds.

    Return at most MOST layouts. In addition, return the config's own layout, if legal. For each recomputation mode, also
    return the fastest PLAIN plain layouts and the fastest PLAIN other simple layouts.
    any_memory: also return layouts that cannot fit. allowed: a further condition on a layout's changes.
    """
    model = Model.of(config)
    rough: list[CandidateLayout] = []
    for changes in _all_changes(config, world, hardware):
        changed = with_changes(config, changes)
        degrees = _degrees(changed, world)
        if degrees is None:
            continue
        state, gathered = least_state(changed, degrees, model), gathered_bytes(changed, degrees, model)
        kept = rough_activations(changed, degrees)
        if _fills_hosts(changed, degrees, hardware):
            continue
        if any_memory or state + gathered + kept / DOUBT <= hardware.memory_bytes:
            seconds = rough_seconds(changed, degrees, hardware, model)
            rough.append(CandidateLayout(changes, changed, degrees, seconds, state, gathered + kept))
    rough.sort(key=lambda layout: layout.seconds)
    found: dict[str, CandidateLayout] = {}
    simple: Counter[tuple[str, bool]] = Counter()
    for layout in rough:
        is_own = all(value == value_of(config, key) for key, value in layout.changes.items())
        kind = layout.mode, layout.is_plain
        wanted = is_own or len(found) < MOST or (layout.is_simple and simple[kind] < PLAIN)
        if wanted and (legal := _legal(layout, config, world)) is not None and allowed(legal.changes):
            found.setdefault(str(sorted(legal.changes.items())), legal)
            simple[kind] += legal.is_simple
    return list(found.values())


def _degrees(config: Config, world: int) -> Degrees | None:
    """Return the degrees of a layout by arithmetic only, without the slower checks of `check_world`.

    None if the layout's degrees do not divide `world` or the global batch.
    """
    parallel, train = config.parallel, config.train
    shard, left = divmod(world, parallel.pp * parallel.dp_replicate * parallel.cp * parallel.tp)
    if left or not shard or (parallel.dp_shard not in (-1, shard)):
        return None
    accumulation, left = divmod(
        train.global_batch_size, train.micro_batch_size * parallel.dp_replicate * shard
    )
    if left or not accumulation or shard * parallel.cp * parallel.tp % parallel.ep:
        return None
    return Degrees(
        world=world,
        pp=parallel.pp,
        dp_replicate=parallel.dp_replicate,
        dp_shard=shard,
        cp=parallel.cp,
        tp=parallel.tp,
        ep=parallel.ep,
        accumulation=accumulation,
    )


def _legal(layout: CandidateLayout, config: Config, world: int) -> CandidateLayout | None:
    """Return the layout with checked degrees; None if a run would refuse it or if the pipeline stages are too uneven.

    Changes that equal the values in `config` are left out of the returned layout.
    """
    changes = {key: value for key, value in layout.changes.items() if value != value_of(config, key)}
    changed = with_changes(config, changes)
    try:
        degrees = check_world(changed, world)
    except UserError:
        return None
    if check(changed) or (degrees.pp > 1 and not _even(changed, degrees)):
        return None
    return replace(layout, changes=changes, config=changed, degrees=degrees)


def _all_changes(config: Config, world: int, hardware: Hardware) -> Iterator[Changes]:
    train = config.train
    yield {}
    tp = [size for size in SIZES if size <= hardware.cards_per_node]
    ep = SIZES if config.model.moe is not None else (1,)
    # Context parallelism does not pay for shorter sequences, unless there are fewer sequences than data ranks.
    cp = [size for size in SIZES[:3] if size == 1 or train.seq_len // size >= SHORTEST]
    micro = [size for size in SIZES[:4] if train.global_batch_size % size == 0]
    engines = dict.fromkeys((config.parallel.data_parallel, "fsdp2", "zero1", "zero2"))
    if not any(train.global_batch_size >= world // (pp * t) for pp, t in itertools.product(SIZES[:5], tp)):
        cp = list(SIZES)
    for pp, c, t, e, replicate in itertools.product(SIZES[:5], cp, tp, ep, SIZES):
        rest, left = divmod(world, pp * c * t)
        # A replica smaller than a node needs more bytes per rank and saves no traffic between nodes.
        small = replicate > 1 and world // (pp * replicate) < hardware.cards_per_node
        if left or rest % replicate or train.global_batch_size % rest or rest * c * t % e or small:
            continue
        for engine, mode, size in itertools.product(engines, MODES, micro):
            changes = {
                "parallel.dp_shard": -1,
                "parallel.pp": pp,
                "parallel.cp": c,
                "parallel.tp": t,
                "parallel.ep": e,
                "parallel.dp_replicate": replicate,
                "parallel.data_parallel": engine,
                "activation_checkpoint.mode": mode,
                "train.micro_batch_size": size,
            }
            if config.model.moe is None:
                del changes["parallel.ep"]
            own = {key: value_of(config, key) for key in (RESHARD, DEFER)}
            if engine == "fsdp2" and (pp > 1 or t > 1) and isinstance(own[RESHARD], int):
                own[RESHARD] = "auto"  # a number of ranks is allowed only without tp and pp
            if pp == 1:
                several = train.global_batch_size > size * rest
                yield from (changes | kept for kept in _accumulations(own, engine, several=several))
                continue
            for schedule in ("1F1B", "Interleaved1F1B"):
                yield changes | own | {"pipeline.schedule": schedule}


def _accumulations(own: Changes, engine: str, *, several: bool) -> Iterator[Changes]:
    """Yield pairs of values for the keys RESHARD and DEFER, beginning with `own`.

    With FSDP2 and several microbatches per step (`several`), also yield the pairs that trade memory for traffic.
    """
    yield own
    if engine == "fsdp2" and several:
        kept = dict.fromkeys((own[RESHARD], "auto", "never"))
        ways = ({RESHARD: reshard, DEFER: defer} for defer in (False, True) for reshard in kept)
        yield from (way for way in ways if way != own)


def _even(config: Config, degrees: Degrees) -> bool:
    """Return whether all stages have equal or nearly equal numbers of layers, as `few_layers` requires."""
    stages = degrees.pp * (1 if config.pipeline.schedule == "1F1B" else 2)
    layers, sizes = config.model.n_layers, config.pipeline.layers_per_stage
    return isinstance(sizes, int) and (not layers % stages or layers // stages >= UNEVEN)


def traceable(layout: CandidateLayout) -> bool:
    """Return whether a search can afford to trace the layout.

    True if a few layers represent the model, if it has at most eight layers, or if a pattern names layers by number. No
    layout of such a model is represented by a few layers.
    """
    config, degrees = layout.config, layout.degrees
    if config.model.n_layers <= 8 or names_layers(config):
        return True
    return few_layers(with_experts_first(config, degrees), degrees) is not None


def least_state(config: Config, degrees: Degrees, model: Model) -> float:
    """Return a lower bound of the bytes of parameters, gradients and optimizer state on a rank."""
    parallel, held = config.parallel, held_parameters(degrees, model)
    storage, compute = DTYPES[config.precision.storage].itemsize, DTYPES[config.precision.compute].itemsize
    state = {"adamw": 2, "lion": 1, "muon": 1}.get(config.optimizer.name, 0)
    state *= {"float32": 4, "bfloat16": 2}.get(config.optimizer.moment_dtype, 1)
    # The ranks of one replica divide all parameters among them, experts included.
    spread = model.parameters / (degrees.world / degrees.dp_replicate)
    if parallel.data_parallel == "fsdp2":
        return spread * (2 * storage + state)
    masters = storage if compute < storage else 0
    if parallel.data_parallel == "ddp":
        return held * (compute + 4 + masters + state)
    gradients = 4 * (held if parallel.data_parallel == "zero1" else spread)
    return held * compute + gradients + spread * (masters + state)


def rough_activations(config: Config, degrees: Degrees) -> float:
    """Estimate the bytes kept for backward on a rank, without gathered parameters (see `gathered_bytes`)."""
    train, mode = config.train, config.activation_checkpoint.mode
    n_layers = config.model.n_layers
    numbers = train.micro_batch_size * train.seq_len / (degrees.cp * degrees.tp) * config.model.dim
    in_flight = min(degrees.pp, degrees.accumulation) / degrees.pp
    if degrees.pp > 1 and config.pipeline.schedule != "1F1B":
        in_flight *= 1.5
    # The layer being recomputed. With offload: the computing layer, and the layer being copied.
    layer = numbers * KEPT["none"] * {"full": degrees.tp, "offload": 2}.get(mode, 1)
    return KEPT.get(mode, KEPT["none"]) * numbers * n_layers * in_flight + layer


def _fills_hosts(config: Config, degrees: Degrees, hardware: Hardware) -> bool:
    """Return whether offloaded activations exceed the host memory of a node, by a rough estimate."""
    if config.activation_checkpoint.mode != "offload" or not hardware.host_memory_gib:
        return False
    kept = config.activation_checkpoint.model_copy(update={"mode": "none"})
    ranks = min(hardware.cards_per_node, degrees.world)
    copied = rough_activations(config.model_copy(update={"activation_checkpoint": kept}), degrees)
    return ranks * copied > hardware.host_memory_bytes


def gathered_bytes(config: Config, degrees: Degrees, model: Model) -> float:
    """Return the bytes of gathered parameters and unreduced gradients held by FSDP2 at once; 0 for other engines.

    By default FSDP2 holds the parameters and gradients of two layers. If it does not reshard after forward, it holds the
    parameters of all layers. If it reduces gradients only after the last microbatch, it holds the gradients of all layers.
    """
    parallel, pipelined = config.parallel, degrees.pp > 1
    if parallel.data_parallel != "fsdp2":
        return 0.0
    two = min(2.0, config.model.n_layers) / config.model.n_layers
    keeps = pipelined or parallel.reshard_after_forward == "never"
    waits = degrees.accumulation > 1 and (pipelined or parallel.defer_gradient_reduction)
    width = (1.0 if keeps else two) * DTYPES[config.precision.compute].itemsize
    width += (1.0 if waits else two) * DTYPES[config.precision.reduce].itemsize
    return width * held_parameters(degrees, model)


def held_parameters(degrees: Degrees, model: Model) -> float:
    """Return the number of parameters in a rank's memory after FSDP2 has gathered all of them."""
    # The ep axis includes the tp ranks, so experts are divided by ep alone.
    return (model.parameters - model.experts) / (degrees.tp * degrees.pp) + model.experts / (
        degrees.pp * max(degrees.ep, 1)
    )


def rough_seconds(config: Config, degrees: Degrees, hardware: Hardware, model: Model) -> float:
    """Return a rough estimate of the seconds of a step."""
    d, train, dim, mode = degrees, config.train, config.model.dim, config.activation_checkpoint.mode
    peak = hardware.peak_flops(config.precision.compute) or hardware.peak_flops("bfloat16") or 1e12
    tokens = train.global_batch_size * train.seq_len / d.world
    touched = TOUCHED * tokens * dim * config.model.n_layers * (FUSED if config.compile.enabled else 1)
    compute = COMPUTED.get(mode, 1.0) * (
        model.flops * tokens / (peak * hardware.efficiency)
        + touched / (hardware.memory_gb_per_s * 1e9 * hardware.memory_efficiency)
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
        moe, calls = config.model.moe, layers * EXPERT_CALLS.get(mode, 4)
        row = microbatch / d.tp * (moe.latent_dim or dim) / dim
        # Codes have half the bytes of bfloat16, in two of four directions.
        coded = 0.75 if config.precision.float8_dispatch else 1.0
        near, nodes = d.ep, d.on_nodes(config, hardware.cards_per_node).ep_nodes
        # With ep_overlap, each part's rows are hidden in one direction; over several nodes, only rows between nodes are.
        exposed = (1 + hardware.overlap_cost) / 2 if config.parallel.ep_overlap else 1.0
        if nodes > 1:
            near = d.ep // nodes
            between = seconds("all_to_all", coded * row * visited_nodes(moe, nodes), near, nodes)
            experts, exposed = exposed * calls * between, 1.0
        experts += exposed * calls * seconds("all_to_all", row * moe.top_k, 1, near)
    held, shards = held_parameters(d, model), d.dp_shard * d.cp
    gather = seconds("all_gather", held * width, d.tp, shards)
    scatter = seconds("reduce_scatter", held * reduce, d.tp, shards)
    copies = seconds("all_reduce", held / shards * reduce, d.tp * shards, d.dp_replicate)
    times = d.accumulation if d.pp == 1 else 1
    if config.parallel.data_parallel == "fsdp2":
        kept = d.pp > 1 or config.parallel.reshard_after_forward == "never"
        reductions = 1 if config.parallel.defer_gradient_reduction else times
        data = gather * (1 if kept else 2 * times) + scatter * reductions + copies
    else:
        data = gather + copies + scatter * (times if config.parallel.data_parallel == "zero2" else 1)
    stages = 1 if config.pipeline.schedule == "1F1B" else 2
    bubble = (d.pp - 1) / (d.accumulation * stages)
    waits = compute + tensor + context + experts + hardware.overlap_cost * min(data, compute)
    if mode == "offload":
        # Forward takes a third of the computation, and hides the copies to the host; backward hides the copies back.
        moved = KEPT["none"] * tokens * dim * config.model.n_layers / (hardware.host_gb_per_s * 1e9)
        waits += sum(max(0.0, moved - share * compute) for share in (1 / 3, 2 / 3))
    # Expert parallelism over nodes shares the NIC with data parallelism.
    network = data + (experts if d.ep > hardware.cards_per_node else 0.0)
    return max(waits, network) * (1 + bubble)


def with_changes(config: Config, changes: Changes) -> Config:
    """Return `config` with the values of `changes`, a dict from `section.key` to a value."""
    updates: dict[str, Changes] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        updates.setdefault(section, {})[name] = value
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in updates.items()}
    return config.model_copy(update=sections)


def value_of(config: Config, key: str) -> Any:
    """Return the value of `section.key` in `config`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
