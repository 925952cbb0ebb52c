"""Whether a configuration fits a number of processes, told before any process group exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from forge.config.layout import Parallel
from forge.config.messages import divisors, multiples, raise_all
from forge.config.pipeline import check_microbatches
from forge.config.schema import Config
from forge.errors import UserError


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
    parallel, train = config.parallel, config.train
    dp_shard = _resolve_dp_shard(parallel, world_size)
    dp = parallel.dp_replicate * dp_shard
    raise_all([*_wrong_degrees(config, dp_shard), *_wrong_batch(config, dp)])
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


def _resolve_dp_shard(parallel: Parallel, world: int) -> int:
    """Raises UserError by itself, because every other equation has dp_shard in it."""
    rest = parallel.dp_shard == -1
    names = ["pp", "dp_replicate", "cp", "tp", *([] if rest else ["dp_shard"])]
    degrees = [getattr(parallel, name) for name in names]
    product = prod(degrees)
    equation = f"{' * '.join(names)} = {' * '.join(map(str, degrees))} = {product}"
    others = product if rest else product // parallel.dp_shard
    if rest and world % product:
        processes = "1 process is" if world == 1 else f"{world} processes are"
        raise UserError(
            f"parallel.dp_shard = -1: {processes} not a multiple of {equation}; "
            f"start {multiples(world, product)} processes, or change a degree"
        )
    if not rest and product != world:
        remedy = (
            f"set parallel.dp_shard = {world // others} or -1" if world % others == 0 else "change a degree"
        )
        raise UserError(
            f"parallel.dp_shard = {parallel.dp_shard}: {equation}, "
            f"but there {'is 1 process' if world == 1 else f'are {world} processes'}; start {product}, or {remedy}"
        )
    return world // others


def _wrong_degrees(config: Config, dp_shard: int) -> Iterator[str]:
    parallel, moe = config.parallel, config.model.moe
    cp, tp, ep = parallel.cp, parallel.tp, parallel.ep
    ranks = dp_shard * cp * tp
    if ranks % ep:
        yield (
            f"parallel.ep = {ep}: must be a divisor of dp_shard * cp * tp = ep_shard * ep, which is "
            f"{dp_shard} * {cp} * {tp} = {ranks}"
        )
    if moe is not None and moe.n_experts % ep:
        yield (
            f"parallel.ep = {ep}: must divide model.moe.n_experts = {moe.n_experts}; "
            f"use a divisor of {moe.n_experts}"
        )
    ways = parallel.reshard_after_forward if parallel.data_parallel == "fsdp2" else "auto"
    if isinstance(ways, int) and dp_shard * cp % ways:
        yield (
            f"parallel.reshard_after_forward = {ways}: does not divide dp_shard * cp = {dp_shard} * "
            f"{cp} = {dp_shard * cp}; use one of its divisors, or auto, always, never"
        )
    seq, heads = config.train.seq_len, config.model.n_heads
    if cp > 1 and seq % (2 * cp):
        yield (
            f"train.seq_len = {seq}: not a multiple of 2 * cp = 2 * {cp} = {2 * cp}, the chunks that a sequence is "
            f"cut into; set train.seq_len = {multiples(seq, 2 * cp)}"
        )
    if parallel.context == "ulysses" and heads % tp == 0 and heads // tp % cp:
        share = f"model.n_heads = {heads}"
        if tp > 1:
            share = f"model.n_heads / tp = {heads} / {tp} = {heads // tp}"
        yield (
            f"parallel.cp = {cp}: parallel.context = ulysses exchanges whole heads, so cp must divide {share}; use one "
            f"of {divisors(heads // tp)}, or parallel.context = allgather or ring"
        )


def _wrong_batch(config: Config, dp: int) -> Iterator[str]:
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    if batch % (micro * dp) == 0:
        problem = check_microbatches(config, batch // (micro * dp))
        if problem is not None:
            yield problem
        return
    remedies = f"train.global_batch_size = {multiples(batch, micro * dp)}"
    if batch % dp == 0:
        best = max(size for size in range(1, micro) if batch // dp % size == 0)
        remedies += f", or train.micro_batch_size = {best}"
    replicate = config.parallel.dp_replicate
    yield (
        f"train.global_batch_size = {batch}: not a multiple of micro_batch_size * dp_replicate * dp_shard "
        f"= {micro} * {replicate} * {dp // replicate} = {micro * dp}; set {remedies}"
    )
