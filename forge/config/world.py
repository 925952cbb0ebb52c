"""The layout of a configuration for a world size, checked before any process group exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isqrt, prod

from forge.config.checks import divisors
from forge.config.load import CommandLine, load_command
from forge.config.phases import Phases, variants
from forge.config.pipeline import check_microbatches
from forge.config.problem import Problem, multiples, problem, raise_all, with_values
from forge.config.schema import Config
from forge.runtime.errors import UserError


@dataclass(frozen=True)
class Degrees:
    """The resolved degrees of a run: world = pp * dp_replicate * dp_shard * cp * tp.

    accumulation: number of microbatches per data-parallel rank and optimizer step, so global_batch_size = accumulation
    * micro_batch_size * dp. ep_nodes: number of nodes of an ep group; 1 if dispatch ignores nodes.
    """

    world: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    accumulation: int
    ep_nodes: int = 1

    @property
    def dp(self) -> int:
        """Return the number of data-parallel ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def ep_shard(self) -> int:
        """Return the number of ranks sharding one expert's parameters: ep_shard * ep = dp_shard * cp * tp."""
        return self.dp_shard * self.cp * self.tp // self.ep

    def on_nodes(self, config: Config, size: int) -> Degrees:
        """Return the degrees, with `ep_nodes` set if `parallel.ep_node_size` = auto.

        size: ranks per node; 0: unknown, or nodes differ. `ep_nodes` stays 1 unless `size` divides ep and world.
        """
        if config.parallel.ep_node_size != "auto" or size < 1 or self.ep % size or self.world % size:
            return self
        return replace(self, ep_nodes=self.ep // size)


def check_world(config: Config, world_size: int) -> Degrees:
    """Return the layout of `config` on `world_size` processes.

    Raises UserError with each violated equation, its numbers and a remedy.
    """
    assert world_size >= 1
    parallel, train = config.parallel, config.train
    others = {name: getattr(parallel, name) for name in ("pp", "dp_replicate", "cp", "tp")}
    # Check dp_shard first and alone, because every other equation contains it.
    raise_all(with_values(_check_dp_shard(config, world_size, others), config))
    dp_shard = world_size // prod(others.values())
    dp = parallel.dp_replicate * dp_shard
    for number, variant in ((0, config), *variants(config)):
        problems = [*_check_degrees(variant, dp_shard), *_check_batch(variant, dp)]
        raise_all(with_values(problems, variant, number))
    if parallel.pp > 1:
        # `variants` has the ends of a ramp. Batches between them are divisible like the ends, but may not suit a schedule.
        for number, batch, micro in Phases(config).ramped_batches():
            raise_all(with_values(check_microbatches(config, batch // (micro * dp)), config, number))
    accumulation = train.global_batch_size // (train.micro_batch_size * dp)
    size = parallel.ep_node_size
    ep_nodes = 1 if size == "auto" or parallel.ep == 1 else parallel.ep // size
    return Degrees(
        world_size, dp_shard=dp_shard, ep=parallel.ep, accumulation=accumulation, ep_nodes=ep_nodes, **others
    )


def _check_dp_shard(config: Config, world: int, others: dict[str, int]) -> Iterator[Problem]:
    dp_shard = config.parallel.dp_shard
    degrees = others if dp_shard == -1 else others | {"dp_shard": dp_shard}
    rest, product = prod(others.values()), prod(degrees.values())
    equation = f"{' * '.join(degrees)} = {' * '.join(map(str, degrees.values()))} = {product}"
    there = "there is 1 process" if world == 1 else f"there are {world} processes"
    if dp_shard == -1 and world % rest:
        remedy = f"start {multiples(world, rest)} processes, or change a degree"
        needed = f"needs a multiple of {equation} processes, but {there}"
        yield problem("parallel.dp_shard", needed, remedy)
    if dp_shard != -1 and world != product:
        other = "change a degree" if world % rest else f"set parallel.dp_shard = {world // rest} or -1"
        remedy = f"start {product} processes, or {other}"
        yield problem("parallel.dp_shard", f"needs {equation} processes, but {there}", remedy)


def _check_degrees(config: Config, dp_shard: int) -> Iterator[Problem]:
    parallel, model, train = config.parallel, config.model, config.train
    cp, tp, ep = parallel.cp, parallel.tp, parallel.ep
    if (ranks := dp_shard * cp * tp) % ep:
        equation = f"dp_shard * cp * tp = {dp_shard} * {cp} * {tp} = {ranks}"
        yield problem("parallel.ep", f"must divide {equation}", f"use one of {divisors(ranks)}")
    if model.moe is not None and model.moe.n_experts % ep:
        remedy = f"use one of {divisors(model.moe.n_experts)}"
        yield problem("parallel.ep", f"must divide {model.moe.n_experts = }", remedy)
    if ep > 1 and parallel.ep_node_size != "auto" and ep % parallel.ep_node_size:
        remedy = f"use one of {divisors(ep)}, or auto"
        yield problem("parallel.ep_node_size", f"must divide parallel.ep = {ep}", remedy)
    ways = parallel.reshard_after_forward if parallel.data_parallel == "fsdp2" else "auto"
    if isinstance(ways, int) and dp_shard * cp % ways:
        remedy = f"use one of {divisors(dp_shard * cp)}, or auto, always, never"
        equation = f"dp_shard * cp = {dp_shard} * {cp} = {dp_shard * cp}"
        yield problem("parallel.reshard_after_forward", f"must divide {equation}", remedy)
    if cp > 1 and train.seq_len % (2 * cp):
        chunks = f"2 * cp = 2 * {cp} = {2 * cp}, the number of chunks of a sequence"
        remedy = f"set train.seq_len = {multiples(train.seq_len, 2 * cp)}"
        yield problem("train.seq_len", f"must be a multiple of {chunks}", remedy)
    heads = model.n_heads // tp
    some = set(model.pattern) != {"linear"}
    # Another plan may leave attention whole. UlyssesAttention then checks the heads.
    known = tp == 1 or parallel.tp_plan == "auto"
    if parallel.context == "ulysses" and some and known and model.n_heads % tp == 0 and heads % cp:
        share = f"model.n_heads / tp = {model.n_heads} / {tp} = {heads}"
        reason = "because parallel.context = ulysses exchanges whole heads"
        remedy = f"use one of {divisors(heads)}, or set parallel.context = allgather or ring"
        yield problem("parallel.cp", f"must divide {share}, {reason}", remedy)


def _check_batch(config: Config, dp: int) -> Iterator[Problem]:
    batch, micro, replicate = (
        config.train.global_batch_size,
        config.train.micro_batch_size,
        config.parallel.dp_replicate,
    )
    if batch % (micro * dp) == 0:
        yield from check_microbatches(config, batch // (micro * dp))
        return
    remedy = f"set train.global_batch_size = {multiples(batch, micro * dp)}"
    if batch % dp == 0:
        best = _divisor(batch // dp, micro - 1)
        remedy += f", or train.micro_batch_size = {best}"
    product = f"{micro} * {replicate} * {dp // replicate} = {micro * dp}"
    equation = f"micro_batch_size * dp_replicate * dp_shard = {product}"
    yield problem("train.global_batch_size", f"must be a multiple of {equation}", remedy)


def choose_layout(command: CommandLine, config: Config, world_size: int) -> tuple[Config, Degrees, str]:
    """Return the config to train with on `world_size` processes, its layout, and the chosen fallback ("": none).

    command: the command line from which `config` was loaded. Raises UserError if a fallback is invalid, or if neither
    the config nor any fallback fits.
    """
    fallbacks = [(text, _with(command, text)) for text in config.parallel.fallbacks]
    try:
        return config, check_world(config, world_size), ""
    except UserError as error:
        first = error
    for text, other in fallbacks:
        try:
            return other, check_world(other, world_size), text
        except UserError:
            continue
    if fallbacks:
        raise UserError(f"{first}; none of the {len(fallbacks)} parallel.fallbacks fits either")
    raise first


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`."""
    small = [one for one in range(1, min(isqrt(number), most) + 1) if number % one == 0]
    return max(one for one in (*small, *(number // one for one in small)) if one <= most)


def _with(command: CommandLine, text: str) -> Config:
    """Return the configuration of `command` with the overrides in `text` appended. Raises UserError.

    If the overrides set train.micro_batch_size, phases have at most this number of sequences in a microbatch: the largest
    divisor of their own number.
    """
    pairs = [override.partition("=") for override in text.split()]
    raw = (*command.raw, *((key, value) for key, _, value in pairs))
    try:
        config = load_command(replace(command, raw=raw))
        if not any(key == "train.micro_batch_size" for key, *_ in pairs):
            return config
        most = config.train.micro_batch_size
        phases = [
            phase.model_copy(update={"micro_batch_size": _divisor(phase.micro_batch_size or most, most)})
            for phase in config.phase
        ]
        return config.model_copy(update={"phase": tuple(phases)})
    except UserError as error:
        raise UserError(f'parallel.fallbacks, "{text}": {error}') from None
