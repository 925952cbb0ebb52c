"""Keys that would take memory off a rank, each with a value that forge accepts with the rest of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from forge.config import Config, Degrees, check_world
from forge.config.checks import check
from forge.config.toml import to_literal
from forge.errors import UserError

SAME_CURVE = "; the curve stays the same"


class Change(NamedTuple):
    """A change of one key; `times` as many processes as now make it possible."""

    key: str
    value: Any
    effect: str
    times: int = 1


def advice(config: Config, degrees: Degrees, state_dominates: bool, on_card: bool) -> list[str]:
    """Three lines `key = value  # what it does`, the most fitting first.

    `state_dominates`: parameters, gradients and optimizer state take the memory, and not activations. `on_card`: it is
    the memory of a card, which has the host's beside it.
    """
    on_state, on_activations = _on_state(config, degrees, on_card), _on_activations(config)
    changes = chain(on_state, on_activations) if state_dominates else chain(on_activations, on_state)
    usable = (change for change in changes if _accepted(config, degrees, change))
    return [f"{one.key} = {to_literal(one.value)}  # {one.effect}" for one in islice(usable, 3)]


def _on_activations(config: Config) -> Iterator[Change]:
    train = config.train
    micro = train.micro_batch_size
    if micro > 1:
        # The largest proper divisor keeps the division of the global batch exact.
        smaller = max(size for size in range(1, micro) if micro % size == 0)
        yield Change("train.micro_batch_size", smaller, "fewer activations at once" + SAME_CURVE)
    if config.activation_checkpoint.mode != "full":
        yield Change("activation_checkpoint.mode", "full", "recompute activations in backward" + SAME_CURVE)
    if train.loss_chunk_tokens > 128:
        fewer = train.loss_chunk_tokens // 4
        yield Change("train.loss_chunk_tokens", fewer, "fewer logits at once" + SAME_CURVE)
    if train.seq_len > 1:
        yield Change("train.seq_len", train.seq_len // 2, "shorter sequences: another run, on other samples")


def _on_state(config: Config, degrees: Degrees, on_card: bool) -> Iterator[Change]:
    if config.parallel.data_parallel != "fsdp2":
        yield Change(
            "parallel.data_parallel", "fsdp2", "shard parameters, gradients and optimizer" + SAME_CURVE
        )
    if degrees.dp_replicate > 1:
        yield Change(
            "parallel.dp_replicate", 1, "with parallel.dp_shard = -1: shard over all ranks" + SAME_CURVE
        )
    more = f"half the state per rank, on {2 * degrees.world} processes" + SAME_CURVE
    yield Change("parallel.dp_shard", 2 * degrees.dp_shard, more, times=2)
    if on_card and not config.parallel.cpu_offload:
        yield Change("parallel.cpu_offload", True, "state in host memory, slow" + SAME_CURVE)
    if ":" not in config.optimizer.name and config.optimizer.moment_dtype == "float32":
        yield Change("optimizer.moment_dtype", "bfloat16", "half the optimizer state or less, less exact")
    if config.precision.storage == "float64":
        yield Change("precision.storage", "float32", "half the state")


def _accepted(config: Config, degrees: Degrees, change: Change) -> bool:
    """Whether the configuration with this change is valid, built, and fits the processes."""
    section, _, name = change.key.partition(".")
    changes = {name: change.value}
    if change.key == "parallel.dp_replicate":
        changes["dp_shard"] = -1
    changed = config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})
    try:
        check_world(changed, change.times * degrees.world)
    except UserError:
        return False
    return not check(changed)
