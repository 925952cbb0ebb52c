"""Whether a configuration fits a number of processes, told before any process group exists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from forge.config.messages import raise_all
from forge.config.pipeline import check_microbatches
from forge.config.schema import Config


@dataclass(frozen=True)
class Degrees:
    """The layout of a run: world = pp * dp_replicate * dp_shard * cp * tp, all resolved.

    `accumulation` is the number of microbatches per data-parallel rank and optimizer step:
    global_batch_size = accumulation * micro_batch_size * dp.
    """

    world: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    accumulation: int

    @property
    def dp(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def ep_shard(self) -> int:
        """Ranks that share one expert's parameters: ep_shard * ep = dp_shard * cp * tp."""
        return self.dp_shard * self.cp * self.tp // self.ep


def check_world(config: Config, world_size: int) -> Degrees:
    """The layout of `config` on `world_size` processes.

    Raises UserError, with each equation that fails, its numbers and a remedy.
    """
    assert world_size >= 1
    dp_shard, problems = _resolve_dp_shard(config, world_size)
    raise_all(problems)  # every other equation has dp_shard in it
    parallel, train = config.parallel, config.train
    dp = parallel.dp_replicate * dp_shard
    raise_all(
        [
            *_experts(config, dp_shard),
            *_resharding(config, dp_shard),
            *_batch(config, dp),
            *_context(config),
        ]
    )
    return Degrees(
        world=world_size,
        pp=parallel.pp,
        dp_replicate=parallel.dp_replicate,
        dp_shard=dp_shard,
        cp=parallel.cp,
        tp=parallel.tp,
        ep=parallel.ep,
        accumulation=train.global_batch_size // (train.micro_batch_size * dp),
    )


def _resolve_dp_shard(config: Config, world: int) -> tuple[int, list[str]]:
    parallel = config.parallel
    others = {name: getattr(parallel, name) for name in ("pp", "dp_replicate", "cp", "tp")}
    fixed = prod(others.values())
    equation = f"{_product(others)} = {_product(others.values())} = {fixed}"
    if parallel.dp_shard == -1 and world % fixed == 0:
        return world // fixed, []
    if parallel.dp_shard == -1:
        return 0, [
            f"parallel.dp_shard = -1: {world} processes are not a multiple of {equation}; "
            f"start {' or '.join(map(str, _around(world, fixed)))} processes, or change a degree"
        ]
    wanted = fixed * parallel.dp_shard
    if wanted == world:
        return parallel.dp_shard, []
    remedy = f"set parallel.dp_shard = {world // fixed} or -1" if world % fixed == 0 else "change a degree"
    names, numbers = [*others, "dp_shard"], [*others.values(), parallel.dp_shard]
    return 0, [
        f"parallel.dp_shard = {parallel.dp_shard}: {_product(names)} = {_product(numbers)} = {wanted}, "
        f"but there {'is 1 process' if world == 1 else f'are {world} processes'}; start {wanted}, or {remedy}"
    ]


def _product(factors: Iterable[object]) -> str:
    return " * ".join(map(str, factors))


def _experts(config: Config, dp_shard: int) -> Iterator[str]:
    parallel, moe = config.parallel, config.model.moe
    ranks = dp_shard * parallel.cp * parallel.tp
    if ranks % parallel.ep:
        yield (
            f"parallel.ep = {parallel.ep}: must be a divisor of dp_shard * cp * tp = ep_shard * ep, which is "
            f"{dp_shard} * {parallel.cp} * {parallel.tp} = {ranks}"
        )
    if moe is not None and moe.n_experts % parallel.ep:
        yield (
            f"parallel.ep = {parallel.ep}: must divide model.moe.n_experts = {moe.n_experts}; "
            f"use a divisor of {moe.n_experts}"
        )


def _resharding(config: Config, dp_shard: int) -> Iterator[str]:
    ways, ranks = config.parallel.reshard_after_forward, dp_shard * config.parallel.cp
    if isinstance(ways, int) and ranks % ways:
        yield (
            f"parallel.reshard_after_forward = {ways}: does not divide dp_shard * cp = {dp_shard} * "
            f"{config.parallel.cp} = {ranks}; use one of its divisors, or auto, always, never"
        )


def _batch(config: Config, dp: int) -> Iterator[str]:
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    if batch % (micro * dp) == 0:
        problem = check_microbatches(config, batch // (micro * dp))
        if problem is not None:
            yield problem
        return
    remedies = [f"train.global_batch_size = {' or '.join(map(str, _around(batch, micro * dp)))}"]
    if batch % dp == 0:
        best = max(size for size in range(1, micro) if batch // dp % size == 0)
        remedies.append(f"train.micro_batch_size = {best}")
    replicate = config.parallel.dp_replicate
    yield (
        f"train.global_batch_size = {batch}: not a multiple of micro_batch_size * dp_replicate * dp_shard "
        f"= {micro} * {replicate} * {dp // replicate} = {micro * dp}; set {', or '.join(remedies)}"
    )


def _context(config: Config) -> Iterator[str]:
    parallel, seq = config.parallel, config.train.seq_len
    cp, tp, heads = parallel.cp, parallel.tp, config.model.n_heads
    if cp == 1:
        return
    if seq % (2 * cp):
        yield (
            f"train.seq_len = {seq}: not a multiple of 2 * cp = 2 * {cp} = {2 * cp}, the chunks that a sequence is "
            f"cut into; set train.seq_len = {' or '.join(map(str, _around(seq, 2 * cp)))}"
        )
    if parallel.context == "ulysses" and heads % tp == 0 and heads // tp % cp:
        share = (
            f"model.n_heads = {heads}" if tp == 1 else f"model.n_heads / tp = {heads} / {tp} = {heads // tp}"
        )
        divisors = [str(n) for n in range(1, heads // tp + 1) if heads // tp % n == 0]
        yield (
            f"parallel.cp = {cp}: parallel.context = ulysses exchanges whole heads, so cp must divide {share}; use one "
            f"of {', '.join(divisors)}, or parallel.context = allgather or ring"
        )


def _around(number: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `number`, below (if positive) and above."""
    lower = number // unit * unit
    return [n for n in (lower, lower + unit) if n]
