"""What other ranks would answer if an optimizer asked which parts of the parameters they hold: arithmetic on their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist

from forge.config import Degrees
from forge.parallel.engines.buffered.layout import Bucket, Slot, flat_boxes
from forge.parallel.engines.buffered.plan import Groups
from forge.parallel.engines.engine import DataParallel
from forge.parallel.layout import local_box
from forge.shard import Box, Shard

Place: TypeAlias = Mapping[str, int]
"""Of a rank, by mesh axis."""


def boxes_of_all(
    engines: Sequence[DataParallel],
    degrees: Degrees,
    shards: Sequence[Shard],
    group: dist.ProcessGroup | None,
) -> list[list[tuple[Box, ...]]]:
    """In place of `forge.optim.optimizer.boxes_of_all`, for shards of these engines."""
    if group is None or group.size() == 1:
        return [[shard.boxes for shard in shards]]
    boxes_at = {name: function for engine in engines for name, function in _functions(engine)}
    everyones = []
    for rank in dist.get_process_group_ranks(group):
        at = place_of(rank, degrees)
        everyones.append([boxes_at[shard.name](at) for shard in shards])
    assert everyones[group.rank()] == [shard.boxes for shard in shards]
    return everyones


def place_of(rank: int, degrees: Degrees) -> Place:
    """Return the rank's place on every axis of `Meshes` that divides parameters."""
    copy = degrees.dp_shard * degrees.cp * degrees.tp
    in_copy = rank % copy
    return {
        "dp_replicate": rank // copy % degrees.dp_replicate,
        "dp_shard_cp": in_copy // degrees.tp,
        "tp": in_copy % degrees.tp,
        "ep_shard": in_copy // degrees.ep,
        "ep": in_copy % degrees.ep,
    }


def _functions(engine: Any) -> Iterator[tuple[str, Callable[[Place], tuple[Box, ...]]]]:
    """Yield each parameter of an engine with what it gives to the rank at a place."""
    if not hasattr(engine, "buffers"):
        yield from ((shard.name, partial(_of_units, shard.parameter)) for shard in engine.shards)
        return
    for buffer in engine.buffers:
        for memory in buffer.buckets:
            for placed in memory.parameters:
                yield (
                    placed.name,
                    partial(_of_buckets, buffer.plan.groups, memory.bucket, placed.slot, placed.parameter),
                )


def _of_units(parameter: Any, at: Place) -> tuple[Box, ...]:
    box = local_box(parameter, at)
    return (box,) if box.numel else ()


def _of_buckets(groups: Groups, bucket: Bucket, slot: Slot, parameter: Any, at: Place) -> tuple[Box, ...]:
    box = local_box(parameter, at)
    start, stop, _ = bucket.kept(slot, groups.part_at(at))
    return flat_boxes(box, min(start, box.numel), min(stop, box.numel))
