"""Which process this is among all, by what launchers put into the environment."""

from __future__ import annotations

import pytest

from forge.distributed import World, _first_slurm_host, read_world
from forge.errors import UserError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_MAX_RESTARTS": "5",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    "environment, world",
    [
        ({}, World(0, 1, 0, "python")),
        # A shell inside a job of several tasks, not a step of them.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, World(0, 1, 0, "python")),
        (SRUN, World(2, 4, 0, "srun")),
        (TORCHRUN, World(3, 8, 1, "torchrun", restarts_left=3)),
        (TORCHRUN | SRUN, World(3, 8, 1, "torchrun", restarts_left=3)),
    ],
)
def test_the_launcher_says_who_this_is(environment: dict[str, str], world: World) -> None:
    assert read_world(environment) == world


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_MAX_RESTARTS"])
def test_what_is_no_number_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} = first is no whole number"):
        read_world(TORCHRUN | {name: "first"})


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_ranks_that_cannot_meet_are_told_so_at_once(name: str) -> None:
    with pytest.raises(UserError, match=f"but {name}, where the ranks meet, is not"):
        read_world({key: value for key, value in TORCHRUN.items() if key != name})


def test_a_step_that_does_not_say_which_task_this_is() -> None:
    with pytest.raises(UserError, match="SLURM_PROCID is missing"):
        read_world({"SLURM_STEP_NUM_TASKS": "4"})


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("localhost", "localhost"),
        ("gpu[003-006,9],login1", "gpu003"),
        ("gpu-a[7]", "gpu-a7"),
        ("node12,node13", "node12"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert _first_slurm_host({"SLURM_STEP_NODELIST": nodes}) == first
