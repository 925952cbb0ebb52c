"""Neighbours on every mesh, and the existing groups."""

from typing import Any

import torch.distributed as dist

from forge.config import Degrees
from forge.parallel.mesh import make_meshes
from tests.support.harness import run_ranks


def degrees(**sizes: int) -> Degrees:
    axes = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1} | sizes
    world = axes["pp"] * axes["dp_replicate"] * axes["dp_shard"] * axes["cp"] * axes["tp"]
    return Degrees(world=world, accumulation=1, **axes)


def neighbours(rank: int, world: int, layout: Degrees) -> dict[str, Any]:
    meshes = make_meshes(layout, "cpu")
    return {
        "tp": meshes.tp.mesh.tolist(),
        "fsdp": meshes.fsdp.mesh.tolist(),
        "ep": meshes.ep.mesh.tolist(),
        "fsdp_experts": meshes.fsdp_experts.mesh.tolist(),
        "cp": dist.get_process_group_ranks(meshes.cp),
        "sequence": dist.get_process_group_ranks(meshes.sequence),
        "stage": dist.get_process_group_ranks(meshes.stage),
        "loss": dist.get_process_group_ranks(meshes.loss),
        "copies": dist.get_process_group_ranks(meshes.copies["dp_replicate",]),
        "data_rank": meshes.data_rank,
    }


def test_tp_is_fastest_then_cp_then_the_data_axes() -> None:
    ranks = run_ranks(neighbours, 8, degrees(dp_shard=2, cp=2, tp=2))
    assert ranks[0]["tp"] == [0, 1] and ranks[5]["tp"] == [4, 5]
    assert ranks[0]["cp"] == [0, 2] and ranks[7]["cp"] == [5, 7]
    assert ranks[0]["sequence"] == [0, 1, 2, 3] and ranks[7]["sequence"] == [4, 5, 6, 7]
    assert ranks[0]["fsdp"] == [0, 2, 4, 6] == ranks[0]["loss"]
    assert ranks[3]["stage"] == list(range(8))
    assert [rank["data_rank"] for rank in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_replicas_are_the_slow_axis_of_the_sharding_mesh() -> None:
    ranks = run_ranks(neighbours, 4, degrees(dp_replicate=2, dp_shard=2))
    assert ranks[0]["fsdp"] == [[0, 1], [2, 3]]
    assert ranks[1]["copies"] == [1, 3]
    assert ranks[3]["loss"] == [0, 1, 2, 3]


def test_experts_spread_over_all_ranks_of_one_replica() -> None:
    ranks = run_ranks(neighbours, 4, degrees(dp_shard=2, tp=2, ep=4))
    assert ranks[2]["ep"] == [0, 1, 2, 3] and ranks[2]["fsdp_experts"] == [2]
    ranks = run_ranks(neighbours, 4, degrees(dp_shard=2, tp=2, ep=2))
    assert ranks[2]["ep"] == [2, 3] and ranks[2]["fsdp_experts"] == [0, 2]


def test_replicas_copy_the_experts_as_well() -> None:
    ranks = run_ranks(neighbours, 8, degrees(dp_replicate=2, dp_shard=4, ep=2))
    assert ranks[5]["ep"] == [4, 5] and ranks[5]["fsdp_experts"] == [[1, 3], [5, 7]]
    assert ranks[5]["copies"] == [1, 5] and ranks[5]["stage"] == list(range(8))


def test_without_a_data_axis_every_group_is_one_rank() -> None:
    ranks = run_ranks(neighbours, 2, degrees(tp=2))
    assert ranks[1]["fsdp"] == [1] and ranks[1]["loss"] == [1] and ranks[1]["data_rank"] == 0


def groups(rank: int, world: int, layout: Degrees) -> tuple[int, bool, bool]:
    """Return the number of non-default groups; whether loss, stage and fsdp share one; whether ep and fsdp share one."""
    meshes = make_meshes(layout, "cpu")
    fsdp = meshes.fsdp.get_group()
    number = len(dist.distributed_c10d._world.pg_map) - 1
    return number, meshes.loss is meshes.stage is fsdp, meshes.ep.get_group() is fsdp


def test_equal_sets_of_ranks_share_a_group_except_for_blocking_exchanges() -> None:
    # One for all axes of size 1.
    assert run_ranks(groups, 2, degrees(dp_shard=2)) == [(1, True, False)] * 2
    # And one for experts, so their exchanges do not wait for FSDP's.
    assert run_ranks(groups, 2, degrees(dp_shard=2, ep=2)) == [(2, True, False)] * 2
    # Size 1, tp and ep (the same ranks), fsdp, and the experts' own data axis, instead of one for each of 13 axes.
    assert run_ranks(groups, 4, degrees(dp_shard=2, tp=2, ep=2))[0][0] == 4
