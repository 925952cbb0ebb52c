"""A process's rank and world from launcher variables, and errors shared by all ranks."""

from __future__ import annotations

import resource
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forge.runtime.distributed import (
    RankDifference,
    RanksFailed,
    find_difference,
    gather_from_ranks,
    on_every_rank,
    on_first_rank,
)
from forge.runtime.errors import FAILED, NO_CHECKPOINT, UserError
from forge.runtime.world import OPEN_FILES, World, join, read_world
from tests.support.harness import run_ranks
from tests.support.runs import reserve_port

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
        # A shell inside a multi-task job, not one of its steps.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, World(0, 1, 0, "python")),
        (SRUN, World(2, 4, 0, "srun")),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, World(3, 8, 1, "torchrun", restarts_left=3, local_size=4)),
        (TORCHRUN, World(3, 8, 1, "torchrun", restarts_left=3)),
        (TORCHRUN | SRUN, World(3, 8, 1, "torchrun", restarts_left=3)),
    ],
)
def test_the_launcher_sets_rank_and_world_size(environment: dict[str, str], world: World) -> None:
    assert read_world(environment) == world


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_MAX_RESTARTS"])
def test_a_non_numeric_variable_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} = first is not a whole number"):
        read_world(TORCHRUN | {name: "first"})


@pytest.mark.parametrize("name, other", [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_half_of_rank_and_world_size_is_refused(name: str, other: str) -> None:
    with pytest.raises(UserError, match=f"{name} = 1 is set .*, but {other} is not") as error:
        read_world({name: "1"})
    assert error.value.exit_code == 2


@pytest.mark.parametrize("rank, size", [("2", "2"), ("-1", "2"), ("0", "0")])
def test_a_rank_not_below_the_world_size_is_refused(rank: str, size: str) -> None:
    with pytest.raises(UserError, match=f"RANK = {rank} and WORLD_SIZE = {size} .* must be") as error:
        read_world(TORCHRUN | {"RANK": rank, "WORLD_SIZE": size})
    assert error.value.exit_code == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_for_missing_ranks_is_reported_and_ends(monkeypatch, capfd, rank: int) -> None:
    port, meeting = reserve_port()
    for name, value in meeting.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("forge.runtime.world.SILENT_S", 0.2)
    expected = {
        0: f"1 of 3 processes have arrived at port {meeting['MASTER_PORT']} after",
        1: f"rank 1 waits for rank 0, at {meeting['MASTER_ADDR']}:{meeting['MASTER_PORT']}",
    }
    ends = {0: "only 1 of 3 processes have arrived", 1: "timed out"}
    with pytest.raises((UserError, dist.DistNetworkError), match=ends[rank]):
        join(World(rank, 3, 0, "srun", local_size=1), timedelta(seconds=2))
    assert expected[rank] in capfd.readouterr().err
    port.close()


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_address_is_an_error_before_ranks_connect(name: str) -> None:
    with pytest.raises(UserError, match=rf"but {name} \(part of the rendezvous address\) is not"):
        read_world({key: value for key, value in TORCHRUN.items() if key != name})


def test_a_step_without_a_task_id_is_refused() -> None:
    with pytest.raises(UserError, match="SLURM_PROCID is missing"):
        read_world({"SLURM_STEP_NUM_TASKS": "4"})


@pytest.mark.parametrize(
    "tasks, bind, local_size, bound",
    [("8(x2),4", "", 8, False), ("2", "gres/gpu:per_task:1", 2, True), ("2", "gpu:none", 2, False)],
)
def test_sruns_variables_give_tasks_per_node_and_gpu_binding(
    tasks: str, bind: str, local_size: int, bound: bool
) -> None:
    step = SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURMD_TRES_BIND": bind}
    assert read_world(step) == World(2, 4, 0, "srun", local_size=local_size, bound=bound)


@pytest.mark.parametrize(("cards", "bound", "card"), [(1, True, 0), (4, True, 3), (4, False, 3)])
def test_a_task_with_one_visible_gpu_uses_it(monkeypatch, cards: int, bound: bool, card: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: cards)
    assert World(3, 4, 3, "srun", local_size=4, bound=bound).device == torch.device("cuda", card)


@pytest.mark.parametrize("rank", [0, 3])
def test_more_processes_than_gpus_are_refused_on_every_rank(monkeypatch, rank: int) -> None:
    """Also on rank 0, which prints the error."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UserError, match="4 processes on one node need 4 GPUs, but each sees 2: "):
        join(World(rank, 4, rank, "srun", local_size=4))


def test_a_port_in_use_is_one_sentence(monkeypatch) -> None:
    port, meeting = reserve_port()
    port.listen()
    for name, value in meeting.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match=f"port {meeting['MASTER_PORT']} is in use on .*export another MASTER_PORT"
    ):
        join(World(0, 2, 0, "srun", local_size=1))
    port.close()


def test_results_reach_every_rank_of_the_group() -> None:
    assert run_ranks(_results, 3) == [("0", ["0"], "0"), ("1", ["1", "2"], "1"), ("1", ["1", "2"], "2")]


def _results(rank: int, world: int) -> tuple[str, list[str], str]:
    """Ranks 1 and 2 form one group, rank 0 another."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    group = groups[rank > 0]
    first = on_first_rank("naming", lambda: str(rank), group)
    return (
        first,
        gather_from_ranks("naming", lambda: str(rank), group),
        on_every_rank("x", lambda: str(rank), group),
    )


@pytest.mark.parametrize("together", [on_first_rank, gather_from_ranks, on_every_rank])
def test_an_exception_on_one_rank_is_raised_on_every_rank(together: Callable[..., Any]) -> None:
    failing = 0 if together is on_first_rank else 1
    division = f"reading failed on rank {failing}: ZeroDivisionError: division by zero"
    expected = [("UserError", "no such file", NO_CHECKPOINT), ("RanksFailed", division, FAILED)]
    assert run_ranks(_failures, 2, together, failing) == [expected, expected]


def _failures(
    rank: int, world: int, together: Callable[..., Any], failing: int
) -> list[tuple[str, str, int]]:
    def mistaken() -> None:
        if rank == failing:
            raise UserError("no such file", NO_CHECKPOINT)

    def defective() -> None:
        if rank == failing:
            _ = 1 / 0

    raised = []
    for work in (mistaken, defective):
        with pytest.raises(UserError) as error:
            together("reading", work)
        raised.append((type(error.value).__name__, str(error.value), error.value.exit_code))
    return raised


def test_the_first_of_several_failures_is_named_and_the_others_are_counted() -> None:
    assert run_ranks(_all_fail, 3) == ["writing failed on rank 0: OSError: full (and 2 more ranks)"] * 3


def _all_fail(rank: int, world: int) -> str:
    def work() -> None:
        raise OSError("full")

    with pytest.raises(RanksFailed) as error:
        on_every_rank("writing", work)
    return str(error.value)


def test_joining_raises_the_limit_of_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    assert run_ranks(_limit_after_joining, 1) == [needed]


def _limit_after_joining(rank: int, world: int) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    dist.destroy_process_group()
    join(World(0, 1, 0, "python"))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def difference(rank: int, world: int) -> list[RankDifference | None]:
    equal = find_difference("comparing", {"a": [1, {"b": 2}]})
    missing = find_difference("comparing", {"a": 1} if rank == 1 else {"a": 1, "b": 2})
    other = find_difference("comparing", {"a": 1, "b": float(rank > 1), "c": rank})
    return [equal, missing, other]


@pytest.mark.processes
def test_the_first_difference_between_ranks_is_known_to_all() -> None:
    for found in run_ranks(difference, 3):
        assert found == [None, RankDifference(1, "b", 2, None), RankDifference(1, "c", 0, 1)]
