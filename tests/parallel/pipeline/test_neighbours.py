"""Pipeline ranks with messages between them share a group of two."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from forge.config import Degrees
from forge.parallel.mesh import make_meshes
from forge.parallel.pipeline.execute import neighbour_groups
from tests.support.harness import run_ranks


def _groups(rank: int, world: int, pp: int, rank_of: list[int]) -> dict[int, list[int]]:
    degrees = Degrees(
        world=world, pp=pp, dp_replicate=1, dp_shard=world // pp, cp=1, tp=1, ep=1, accumulation=pp
    )
    groups = neighbour_groups(make_meshes(degrees, "cpu").pp, rank_of)
    return {other: dist.get_process_group_ranks(group) for other, group in groups.items()}


LOOP, V = [0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("rank_of", "expected"),
    [
        (LOOP, [{1: [0, 2], 2: [0, 4]}, {0: [0, 2], 2: [2, 4]}, {1: [2, 4], 0: [0, 4]}]),
        (V, [{1: [0, 2]}, {0: [0, 2], 2: [2, 4]}, {1: [2, 4]}]),
    ],
)
def test_each_pair_of_communicating_ranks_has_a_group(
    rank_of: list[int], expected: list[dict[int, list[int]]]
) -> None:
    found = run_ranks(_groups, 6, 3, rank_of)
    assert found[::2] == expected
    assert found[1::2] == [{other: [r + 1 for r in ranks] for other, ranks in of.items()} for of in expected]


def test_a_pipeline_of_two_has_one_group_already() -> None:
    assert run_ranks(_groups, 2, 2, [0, 1]) == [{0: [0, 1], 1: [0, 1]}] * 2
