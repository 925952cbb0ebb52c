"""A process group for each two ranks of a pipeline that send to each other.

NCCL runs the operations of one group one after another, so in a group of the whole pipeline a message would wait for
others that have nothing to do with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.distributed as dist

from forge.parallel.mesh import new_group


def neighbour_groups(pipeline: dist.ProcessGroup, rank_of: Sequence[int]) -> dict[int, dist.ProcessGroup]:
    """Return the groups of two in which this rank is, by the other's rank in `pipeline`. Collective over all ranks.

    rank_of: the rank of the pipeline that holds each stage.
    """
    ranks, own, world = pipeline.size(), pipeline.rank(), dist.group.WORLD
    if ranks <= 2:
        return dict.fromkeys(range(ranks), pipeline)
    assert world is not None
    # Groups that are made at once must not overlap.
    rounds: list[list[tuple[int, ...]]] = []
    for pair in sorted({tuple(sorted(two)) for two in pairwise(rank_of) if two[0] != two[1]}):
        free = (made for made in rounds if not set(pair) & {rank for other in made for rank in other})
        if (joined := next(free, None)) is None:
            rounds.append(joined := [])
        joined.append(pair)
    stride, found = world.size() // ranks, {}  # pp is the slowest axis
    for pairs in rounds:
        # Who is in no pair makes a group, too: a group's name, on which its ranks agree, counts those before it.
        alone = [(rank,) for rank in range(ranks) if rank not in {r for pair in pairs for r in pair}]
        sets = [[stride * r + line for r in few] for few in [*pairs, *alone] for line in range(stride)]
        group = new_group(world, sets, on_cpu=False)
        for pair in pairs:
            if own in pair:
                found[sum(pair) - own] = group
    return found
