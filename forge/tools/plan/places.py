"""Compute which boxes (slices of a tensor) another rank holds, from its mesh coordinates and without communication."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist

from forge.config import Degrees
from forge.parallel.engines.buffered.plan import Bucket, Groups, Slot, flat_boxes
from forge.parallel.layout import local_box
from forge.parallel.step.model import DataParallel
from forge.shard import Box, Shard

RankPlace: TypeAlias = Mapping[str, int]
"""The coordinates of a rank, by mesh axis."""


def known_everywhere(
    shards: Sequence[Shard], engines: Sequence[DataParallel], degrees: Degrees
) -> list[Shard]:
    """Return copies of `shards` with `boxes_on` set, for optimizers. engines: the engines holding the shards.

    `boxes_on(rank)` returns the boxes of the shard's tensor held by `rank`.
    """
    at = functools.cache(partial(place_of, degrees=degrees))
    boxes_at = {name: function for engine in engines for name, function in _functions(engine)}

    def knowing(shard: Shard) -> Shard:
        def boxes_on(rank: int) -> tuple[Box, ...]:
            return boxes_at[shard.name](at(rank))

        assert boxes_on(dist.get_rank()) == shard.boxes
        return replace(shard, boxes_on=boxes_on)

    return [knowing(shard) for shard in shards]


def place_of(rank: int, degrees: Degrees) -> RankPlace:
    """Return the coordinates of `rank` on the mesh axes that divide parameters."""
    copy = degrees.dp_shard * degrees.cp * degrees.tp
    in_copy = rank % copy
    return {
        "dp_replicate": rank // copy % degrees.dp_replicate,
        "dp_shard_cp": in_copy // degrees.tp,
        "tp": in_copy % degrees.tp,
        "ep_shard": in_copy // degrees.ep,
        "ep": in_copy % degrees.ep,
    }


def _functions(engine: Any) -> Iterator[tuple[str, Callable[[RankPlace], tuple[Box, ...]]]]:
    """Yield (parameter name, function) for an engine. The function maps a rank's coordinates to the rank's boxes."""
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


def _of_units(parameter: Any, at: RankPlace) -> tuple[Box, ...]:
    box = local_box(parameter, at)
    return (box,) if box.numel else ()


def _of_buckets(groups: Groups, bucket: Bucket, slot: Slot, parameter: Any, at: RankPlace) -> tuple[Box, ...]:
    box = local_box(parameter, at)
    start, stop, _ = bucket.kept(slot, groups.part_at(at))
    return flat_boxes(box, min(start, box.numel), min(stop, box.numel))
