"""A failed save leaves no files and is reported on all ranks. A killed save leaves the old or the new checkpoint."""

import contextlib
import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forge.checkpoint import Checkpoints
from forge.checkpoint.folders import steps
from forge.runtime.fault import fault_point
from tests.support.checkpoints import inject, loaded_value, names, save_value, whole
from tests.support.harness import RankFailed, run_ranks

Usage = namedtuple("Usage", "total used free")

KILLS = [  # fault point, rank, complete steps afterwards
    ("save.begin", 1, [1]),
    ("save.between_shards", 0, [1]),
    ("save.between_shards", 1, [1]),
    ("save.before_manifest", 0, [1]),
    ("save.before_rename", 0, [1]),
    ("save.before_prune", 0, [1, 2]),
    ("save.during_prune", 0, [2]),
]


def save_and_die(rank: int, world: int, folder: str, fault: str, mode: str) -> None:
    inject(fault)
    checkpoints = Checkpoints(Path(folder), keep_last=1, mode=mode)
    save_value(checkpoints, 1)
    assert all(outcome.error is None for outcome in checkpoints.wait())
    save_value(checkpoints, 2)
    # The killed rank's peer gets here and must detect the death, unless the checkpoint was complete before.
    with contextlib.nullcontext() if "prune" in fault else pytest.raises(RuntimeError, match="gloo"):
        (outcome,) = checkpoints.wait()
        assert outcome.error is None


def find_and_go_on(rank: int, world: int, folder: str, expected: int) -> None:
    checkpoints = Checkpoints(Path(folder), keep_last=1, mode="sync")
    assert checkpoints.latest() == expected and checkpoints.fallbacks == []
    assert loaded_value(checkpoints, expected) == expected
    save_value(checkpoints, 2)
    save_value(checkpoints, 3)
    assert loaded_value(checkpoints, 3) == 3.0


@pytest.mark.parametrize("point, rank, complete", KILLS)
def test_k3_a_kill_at_any_boundary_leaves_the_old_or_the_new_checkpoint(point, rank, complete, tmp_path):
    # Nothing else is wrong: the other rank has exited on its own.
    with pytest.raises(RankFailed, match=rf"\Arank {rank}: died with exit code -9\Z"):
        run_ranks(save_and_die, 2, str(tmp_path), f"{point}:2:{rank}", "async")
    assert steps(tmp_path) == complete
    run_ranks(find_and_go_on, 2, str(tmp_path), complete[-1])
    assert names(tmp_path) == ["step-00000003"]


def fail_once(rank: int, world: int, folder: str, fault: str, mode: str) -> str:
    checkpoints = Checkpoints(Path(folder), mode=mode)
    save_value(checkpoints, 1)
    checkpoints.wait()
    inject(fault)
    (outcome,) = [*save_value(checkpoints, 2), *checkpoints.wait()]
    assert (outcome.step, checkpoints.failures_in_row) == (2, 1) and outcome.error is not None
    assert names(folder) == ["step-00000001"]
    assert checkpoints.latest() == 1 and loaded_value(checkpoints, 1) == 1.0
    inject(None)
    save_value(checkpoints, 3)
    checkpoints.wait()
    assert checkpoints.failures_in_row == 0 and checkpoints.latest() == 3
    return outcome.error


FAILURES = [
    ("save.begin", 1),
    ("save.between_shards", 1),
    ("save.before_manifest", 0),
    ("save.before_rename", 0),
]


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("point, rank", FAILURES)
def test_s4_a_failure_on_one_rank_reaches_all_ranks_and_leaves_nothing(point, rank, mode, tmp_path):
    errors = run_ranks(fail_once, 2, str(tmp_path), f"{point}:2:{rank}:raise", mode)
    assert errors[0] == errors[1] and f"rank {rank}" in errors[0]
    assert "injected by FORGE_FAULT" in errors[0]


def fill_the_disk(rank: int, world: int, folder: str) -> str:
    checkpoints = Checkpoints(Path(folder), mode="async")
    save_value(checkpoints, 1)
    checkpoints.wait()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    save_value(checkpoints, 2)
    (outcome,) = checkpoints.wait()
    assert outcome.error is not None and names(folder) == ["step-00000001"]
    dist.barrier()  # otherwise the other rank may see this rank's next save in the folder
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save_value(checkpoints, 3)
    (retry,) = checkpoints.wait()
    assert retry.error is None and checkpoints.latest() == 3
    return outcome.error


def test_s2_a_file_size_limit_fails_the_save_and_not_the_run(tmp_path):
    errors = run_ranks(fill_the_disk, 2, str(tmp_path))
    assert errors[0] == errors[1] and "rank 1" in errors[0]


def unserialisable(rank: int, world: int, folder: str) -> str | None:
    checkpoints = Checkpoints(Path(folder), mode="async")
    shard = whole("w", torch.zeros(4))
    state = {"step": 1} if rank == 0 else {"step": object()}
    checkpoints.save(1, {"model.w": (shard, shard.data)}, state, {}, {})
    (outcome,) = checkpoints.wait()
    assert names(folder) == []
    return outcome.error


def test_an_error_while_staging_does_not_leave_the_other_ranks_waiting(tmp_path):
    errors = run_ranks(unserialisable, 2, str(tmp_path))
    assert errors[0] == errors[1] and "rank 1" in str(errors[0]) and "JSON" in str(errors[0])


def little_room(rank: int, world: int, folder: str, room: int) -> str | None:
    checkpoints = Checkpoints(Path(folder), mode="sync")
    shutil.disk_usage = lambda path: Usage(10**6, 10**6 - room, room)
    (outcome,) = save_value(checkpoints, 1)
    return outcome.error


def test_s2_a_save_larger_than_the_disk_is_not_begun(tmp_path):
    """Also refused: a save whose tensors fit only without the format's overhead. A save that fits is accepted."""
    assert run_ranks(little_room, 2, str(tmp_path / "any"), 10**6) == [None, None]
    files = [path for path in (tmp_path / "any").rglob("*") if path.is_file()]
    taken = sum(path.stat().st_size for path in files)
    one, other = run_ranks(little_room, 2, str(tmp_path / "less"), taken - 1)
    assert one == other and "the checkpoint needs" in one and "free" in one
    assert names(tmp_path / "less") == []
    # Two ranks hold pieces of one tensor; one of them holds a second tensor.
    pieces = sum(path.suffix == ".distcp" for path in files) + 1
    assert run_ranks(little_room, 2, str(tmp_path / "more"), taken + 1024 * (pieces + 2)) == [None, None]


def prune_fails(rank: int, world: int, folder: str) -> None:
    checkpoints = Checkpoints(Path(folder), keep_last=1, mode="sync")
    save_value(checkpoints, 1)
    inject("save.during_prune:2:0:raise")
    save_value(checkpoints, 2)
    remove, shutil.rmtree = shutil.rmtree, defect
    save_value(checkpoints, 3)
    assert checkpoints.failures_in_row == 0 and checkpoints.latest() == 3
    shutil.rmtree = remove
    save_value(checkpoints, 4)


def defect(path: Path) -> None:
    raise ValueError("whatever it is")


def test_failing_to_remove_an_old_checkpoint_does_not_fail_the_new_one(tmp_path):
    run_ranks(prune_fails, 2, str(tmp_path))
    assert names(tmp_path) == ["step-00000004"]


def test_without_the_variable_a_fault_point_does_nothing():
    inject(None)
    fault_point("save.begin", 1)


@pytest.mark.parametrize("text", ["save.begin:2:0:raise", "save.begin:1:1:raise", "save.end:*:*:raise"])
def test_a_fault_affects_only_its_point_step_and_rank(text, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with contextlib.ExitStack() as stack:
        stack.callback(inject, None)
        inject(text)
        fault_point("save.begin", 1)
        inject("save.begin:*:0:raise")
        with pytest.raises(OSError):
            fault_point("save.begin", 1)
    assert "FORGE_FAULT" not in os.environ
