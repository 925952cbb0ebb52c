"""Which parts of the parameters every rank holds, for optimizers whose update needs more of a tensor than one rank has."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from forge.shard import Box, Shard


def boxes_of_all(shards: Sequence[Shard], group: dist.ProcessGroup | None) -> list[list[tuple[Box, ...]]]:
    """Return the boxes of each of `shards` on every rank of `group`, in its order; None: this process alone. Collective.

    The planner, which has no other ranks to ask, replaces it.
    """
    if group is None or group.size() == 1:
        return [[shard.boxes for shard in shards]]
    mine = [(shard.name, shard.global_shape, shard.boxes) for shard in shards]
    everyones = [mine] * group.size()
    dist.all_gather_object(everyones, mine, group=group)
    for other in everyones:
        assert [of[:2] for of in other] == [of[:2] for of in mine], "ranks have other parameters"
    return [[boxes for *_, boxes in of_rank] for of_rank in everyones]
