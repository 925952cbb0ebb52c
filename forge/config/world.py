"""The layout of a configuration on a number of processes, checked before any process group exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from forge.config.checks import divisors, multiples
from forge.config.explain import about_problem, raise_all
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

    Raises UserError with each equation that does not hold, its numbers and a remedy.
    """
    assert world_size >= 1
    parallel, train = config.parallel, config.train
    names = ("pp", "dp_replicate", "cp", "tp", *(() if parallel.dp_shard == -1 else ("dp_shard",)))
    product = prod(getattr(parallel, name) for name in names)

    def raise_problems(problems: Iterator[str]) -> None:
        raise_all([about_problem(problem, config) for problem in problems])

    # First and alone: every other equation contains dp_shard.
    raise_problems(_check_dp_shard(config, world_size, names, product))
    dp_shard = world_size // product if parallel.dp_shard == -1 else parallel.dp_shard
    dp = parallel.dp_replicate * dp_shard
    raise_problems(iter([*_check_degrees(config, dp_shard), *_check_batch(config, dp)]))
    degrees = {name: getattr(parallel, name) for name in ("pp", "dp_replicate", "cp", "tp", "ep")}
    accumulation = train.global_batch_size // (train.micro_batch_size * dp)
    return Degrees(world=world_size, dp_shard=dp_shard, accumulation=accumulation, **degrees)


def _check_dp_shard(config: Config, world: int, names: tuple[str, ...], product: int) -> Iterator[str]:
    degrees = [getattr(config.parallel, name) for name in names]
    equation = f"{' * '.join(names)} = {' * '.join(map(str, degrees))} = {product}"
    processes = "is 1 process" if world == 1 else f"are {world} processes"
    if "dp_shard" not in names:
        if world % product:
            yield (
                f"parallel.dp_shard needs a number of processes that is a multiple of {equation}, but there {processes}; "
                f"start {multiples(world, product)} processes, or change a degree"
            )
    elif product != world:
        others = product // config.parallel.dp_shard
        remedy = "change a degree" if world % others else f"set parallel.dp_shard = {world // others} or -1"
        yield (
            f"parallel.dp_shard makes {equation}, but there {processes}; start {product} processes, or {remedy}"
        )


def _check_degrees(config: Config, dp_shard: int) -> Iterator[str]:
    parallel, moe, seq_len = config.parallel, config.model.moe, config.train.seq_len
    cp, tp, ep, heads = parallel.cp, parallel.tp, parallel.ep, config.model.n_heads
    if dp_shard * cp * tp % ep:
        ranks = dp_shard * cp * tp
        yield (
            f"parallel.ep must divide dp_shard * cp * tp = {dp_shard} * {cp} * {tp} = {ranks}, which is ep_shard * ep; use "
            f"one of {divisors(ranks)}"
        )
    if moe is not None and moe.n_experts % ep:
        yield f"parallel.ep must divide model.moe.n_experts = {moe.n_experts}; use one of {divisors(moe.n_experts)}"
    ways = parallel.reshard_after_forward if parallel.data_parallel == "fsdp2" else "auto"
    if isinstance(ways, int) and dp_shard * cp % ways:
        yield (
            f"parallel.reshard_after_forward must divide dp_shard * cp = {dp_shard} * {cp} = {dp_shard * cp}; use one of "
            f"{divisors(dp_shard * cp)}, or auto, always, never"
        )
    if cp > 1 and seq_len % (2 * cp):
        yield (
            f"train.seq_len must be a multiple of 2 * cp = 2 * {cp} = {2 * cp}, the number of chunks that a sequence is cut "
            f"into; set train.seq_len = {multiples(seq_len, 2 * cp)}"
        )
    if parallel.context == "ulysses" and heads % tp == 0 and heads // tp % cp:
        share = f"model.n_heads / tp = {heads} / {tp} = {heads // tp}"
        yield (
            f"parallel.cp must divide {share}, because parallel.context = ulysses exchanges whole heads; use one of "
            f"{divisors(heads // tp)}, or parallel.context = allgather or ring"
        )


def _check_batch(config: Config, dp: int) -> Iterator[str]:
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    if batch % (micro * dp) == 0:
        yield from check_microbatches(config, batch // (micro * dp))
        return
    remedies = f"train.global_batch_size = {multiples(batch, micro * dp)}"
    if batch % dp == 0:
        best = max(size for size in range(1, micro) if batch // dp % size == 0)
        remedies += f", or train.micro_batch_size = {best}"
    replicate = config.parallel.dp_replicate
    yield (
        "train.global_batch_size must be a multiple of micro_batch_size * dp_replicate * dp_shard = "
        f"{micro} * {replicate} * {dp // replicate} = {micro * dp}; set {remedies}"
    )
