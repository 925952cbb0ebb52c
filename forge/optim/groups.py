"""Groups of shards that one multi-tensor kernel updates."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from forge.config.schema import OptimizerConfig
from forge.shard import Shard


def update_groups(shards: Sequence[Shard], config: OptimizerConfig, max_numel: int) -> list[list[Shard]]:
    """Group shards of equal weight decay and rates for multi-tensor kernels, decayed ones first.

    A group ends where it reaches `max_numel` elements, which bounds temporaries. Shards without elements are left out.
    """
    kinds: dict[Any, list[list[Shard]]] = {}
    filled: dict[Any, int] = {}  # elements of the last group
    for shard in (shard for shard in shards if shard.boxes):
        kind = any(fnmatchcase(shard.name, glob) for glob in config.no_decay), shard.rates
        groups = kinds.setdefault(kind, [[]])
        if filled.get(kind, 0) >= max_numel:
            groups.append([])
            filled[kind] = 0
        groups[-1].append(shard)
        filled[kind] = filled.get(kind, 0) + sum(box.numel for box in shard.boxes)
    return [group for _, groups in sorted(kinds.items(), key=lambda kind: kind[0][0]) for group in groups]
