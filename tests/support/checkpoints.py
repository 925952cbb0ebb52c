"""Shards of every shape for the checkpoint tests, and functions that the tests call on ranks."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from forge.checkpoint import Checkpoints, SaveOutcome
from forge.parallel.engines.buffered.plan import slice_boxes
from forge.runtime import fault
from forge.shard import Box, Shard


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of distinct, non-zero elements."""
    return (torch.arange(prod(shape), dtype=torch.float64) + 1.25).view(shape).to(dtype)


def flat_slice(name: str, full: Tensor, start: int, stop: int) -> Shard:
    """Return a copy of elements [start, stop) in memory order, like a shard of a contiguous buffer."""
    values = full.reshape(-1)[start:stop].clone()
    return Shard(name, full.shape, tuple(slice_boxes(full.shape, start, stop)), values)


def cut(name: str, full: Tensor, rank: int, world: int) -> Shard:
    """Cut `full` unevenly over the ranks, as flat slices. With few elements, some ranks have none."""
    edges = [round(full.numel() * (i / world) ** 2) for i in range(world + 1)]
    return flat_slice(name, full, edges[rank], edges[rank + 1])


def rows(name: str, full: Tensor, rank: int, world: int) -> Shard:
    """Cut `full` into rows as fully_shard does. Only the last rank holds a scalar."""
    if full.dim() == 0:
        return flat_slice(name, full, 0, int(rank == world - 1))
    size = -(-full.shape[0] // world)
    begin, end = min(rank * size, full.shape[0]), min((rank + 1) * size, full.shape[0])
    row = prod(full.shape[1:])
    return flat_slice(name, full, begin * row, end * row)


def whole(name: str, full: Tensor) -> Shard:
    """Return a replicated shard: each rank holds all of `full`."""
    boxes = (Box((0,) * full.dim(), tuple(full.shape)),)
    return Shard(name, full.shape, boxes, full.clone(), replicas=dist.group.WORLD)


def named(shards: list[Shard]) -> dict[str, tuple[Shard, Tensor]]:
    return {f"model.{shard.name}": (shard, shard.data) for shard in shards}


def inject(text: str | None) -> None:
    """Set FORGE_FAULT for this process."""
    os.environ.pop("FORGE_FAULT", None)
    if text is not None:
        os.environ["FORGE_FAULT"] = text
    fault._fault.cache_clear()


def value_shards(rank: int, world: int, value: float) -> list[Shard]:
    """Return a small model full of `value`: one cut tensor, one replicated."""
    return [
        cut("layers.0.weight", torch.full((5, 7), value), rank, world),
        whole("norm.weight", torch.full((6,), value)),
    ]


def save_value(checkpoints: Checkpoints, step: int, value: float | None = None) -> list[SaveOutcome]:
    """Start to save a model full of `value`. value None: the model is full of `step`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = value_shards(rank, world, float(step) if value is None else value)
    return checkpoints.save(
        step, named(shards), {"step": step}, {"config.toml": b"[run]\n"}, {"dp_shard": world}
    )


def loaded_value(checkpoints: Checkpoints, step: int) -> float:
    """Load the checkpoint of `step`, assert that all its elements have one value, and return this value."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = value_shards(rank, world, float("nan"))
    checkpoints.load(checkpoints.path(step), named(shards))
    found = {element for shard in shards for element in shard.data.tolist()}
    assert len(found) == 1, f"a mix: {found}"
    return found.pop()


def names(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())
