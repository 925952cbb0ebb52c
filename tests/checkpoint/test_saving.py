"""Saving: staging, retention, the folder's content, reports."""

import logging
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forge.checkpoint import Checkpoints, commit, read_config, read_state
from forge.checkpoint.folders import milestones, prune
from forge.checkpoint.manifest import read_manifest
from forge.checkpoint.store import Stager, blocks_for
from forge.shard import Shard
from tests.support.checkpoints import inject, loaded_value, named, names, save_value, value_shards
from tests.support.harness import run_ranks


def save_and_overwrite(rank: int, world: int, folder: str, mode: str) -> None:
    checkpoints = Checkpoints(Path(folder), mode=mode)
    inject("save.between_shards:*:*:sleep=0.2")
    shards = value_shards(rank, world, 1.0)
    checkpoints.save(1, named(shards), {}, {}, {})
    for shard in shards:
        shard.data.fill_(2.0)
    checkpoints.save(2, named(shards), {}, {}, {})
    for shard in shards:
        shard.data.fill_(3.0)
    checkpoints.wait()
    assert [loaded_value(checkpoints, step) for step in (1, 2)] == [1.0, 2.0]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_s5_parameters_may_change_as_soon_as_save_returns(mode, tmp_path):
    run_ranks(save_and_overwrite, 2, str(tmp_path), mode)


@pytest.mark.parametrize("shards", [1, 8])
def test_staging_8b_wastes_little_pinned_memory_to_rounding(shards: int) -> None:
    layer = [4096, 4096 * 4096, 1024 * 4096, 1024 * 4096, 4096 * 4096, 4096, *[14336 * 4096] * 3]
    numels = [128256 * 4096, *layer * 32, 4096, 128256 * 4096]
    sizes = [4 * numel // shards for numel in numels] * 3  # masters and two moments
    blocks, places = blocks_for(sizes)
    assert all(block & (block - 1) == 0 for block in blocks) and sum(blocks) <= 1.03 * sum(sizes)
    assert sum(1 << (size - 1).bit_length() for size in sizes) > 1.1 * sum(sizes)  # one allocation each
    ends = [0] * len(blocks)
    for (block, start), size in sorted(zip(places, sizes, strict=True)):
        assert ends[block] <= start and start % 64 == 0
        ends[block] = start + size
    assert all(end <= block for end, block in zip(ends, blocks, strict=True))


def test_staged_tensors_of_any_kind_are_kept_apart_and_have_storages_of_their_own() -> None:
    values = [
        torch.arange(7.0, dtype=torch.float64),
        torch.ones(3, 5, dtype=torch.bfloat16),
        torch.tensor(4),
        torch.empty(0, 8),
        torch.ones(9, dtype=torch.uint8),
    ]
    tensors = {f"model.{n}": (Shard.whole(str(n), x), x) for n, x in enumerate(values)}
    stager = Stager()
    first = stager.stage(tensors)
    addresses = [piece.data_ptr() for one in first.values() for piece in one._pieces.values()]
    for staged, (_, x) in zip(first.values(), tensors.values(), strict=True):
        for piece in staged._pieces.values():
            assert torch.equal(piece.view(x.shape), x)
            assert piece.untyped_storage().nbytes() == x.nbytes
    again = stager.stage(tensors)
    assert addresses == [piece.data_ptr() for one in again.values() for piece in one._pieces.values()]


def slow_saves(rank: int, world: int, folder: str) -> None:
    checkpoints = Checkpoints(Path(folder), mode="async")
    may_go_on = {step: threading.Event() for step in (1, 2)}
    commit.fault_point = lambda name, step: name != "save.between_shards" or may_go_on[step].wait()
    assert save_value(checkpoints, 1) == [] and checkpoints.poll() == []
    assert "step-00000001" not in names(folder)
    dist.barrier()
    threading.Timer(0.2, may_go_on[1].set).start()  # the next save waits for this event
    (first,) = save_value(checkpoints, 2)
    assert "step-00000001" in names(folder) and "step-00000002" not in names(folder)
    dist.barrier()
    may_go_on[2].set()
    (second,) = checkpoints.wait()
    assert (first.step, second.step) == (1, 2) and first.error is None and second.error is None
    assert checkpoints.wait() == []


def test_s4_async_saves_run_beside_training_one_at_a_time(tmp_path):
    run_ranks(slow_saves, 2, str(tmp_path))


def save_steps(rank: int, world: int, folder: str, keep_last: int, keep_every: int) -> None:
    checkpoints = Checkpoints(Path(folder), keep_last=keep_last, keep_every=keep_every, mode="sync")
    for step in range(1, 8):
        save_value(checkpoints, step)


@pytest.mark.parametrize(
    ("keep_every", "kept"),
    [(0, []), (1000, [1000, 2500, 4000]), (1500, [1999, 4000]), (10_000, [])],
)
def test_time_based_saves_keep_the_first_checkpoint_after_each_multiple(
    keep_every: int, kept: list[int]
) -> None:
    assert sorted(milestones([400, 1000, 1999, 2500, 2900, 4000, 4400], keep_every)) == kept


@pytest.mark.parametrize(
    "keep_last, keep_every, kept", [(2, 0, [6, 7]), (1, 3, [3, 6, 7]), (0, 2, range(1, 8))]
)
def test_the_newest_and_every_nth_are_kept(keep_last, keep_every, kept, tmp_path):
    run_ranks(save_steps, 1, str(tmp_path), keep_last, keep_every)
    assert names(tmp_path) == [f"step-{step:08d}" for step in kept]


def test_a_link_is_no_checkpoint_to_remove(tmp_path):
    run_ranks(save_steps, 1, str(tmp_path / "other"), 0, 0)
    (tmp_path / "own").mkdir()
    link = tmp_path / "own" / "step-00000001"
    link.symlink_to(tmp_path / "other" / link.name)
    before = sorted((tmp_path / "other").rglob("*"))
    for _ in range(2):
        prune(tmp_path / "own", keep_last=1, keep_every=0)
        run_ranks(save_steps, 1, str(tmp_path / "own"), 1, 0)
    assert names(tmp_path / "own") == [link.name, "step-00000007"]
    assert sorted((tmp_path / "other").rglob("*")) == before and link.is_symlink()


def save_again(rank: int, world: int, folder: str) -> None:
    checkpoints = Checkpoints(Path(folder), mode="sync")
    save_value(checkpoints, 1)
    save_value(checkpoints, 1, value=5.0)
    assert loaded_value(checkpoints, 1) == 1.0 and checkpoints.failures_in_row == 0


def test_k4_a_complete_checkpoint_is_never_overwritten(tmp_path):
    run_ranks(save_again, 2, str(tmp_path))


def save_over_remains(rank: int, world: int, folder: str) -> None:
    checkpoints = Checkpoints(Path(folder), mode="sync")
    save_value(checkpoints, 4)
    assert loaded_value(checkpoints, 4) == 4.0 and checkpoints.latest() == 4


def test_k4_remains_of_dead_saves_are_cleared_and_an_incomplete_folder_is_moved(tmp_path):
    for name in (
        ".partial-step-00000004",
        ".partial-step-00000009",
        ".pruned-step-00000001",
        "step-00000004",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"rubbish")
    run_ranks(save_over_remains, 2, str(tmp_path))
    assert names(tmp_path) == [".damaged-step-00000004", "step-00000004"]


def save_files(rank: int, world: int, folder: str) -> None:
    checkpoints = Checkpoints(Path(folder), mode="sync")
    files = (
        {"config.toml": b"[run]\nname = 'x'\n", "tokenizer/deeper/vocabulary": b"abc"} if rank == 0 else {}
    )
    state = {"progress": {"step": 3}, "rate": 0.1}
    (outcome,) = checkpoints.save(3, named(value_shards(rank, world, 3.0)), state, files, {"tp": 2})
    assert outcome.error is None


def test_a_checkpoint_can_be_used_alone(tmp_path):
    run_ranks(save_files, 2, str(tmp_path / "run"))
    path = tmp_path / "run" / "step-00000003"
    assert read_state(path) == {"progress": {"step": 3}, "rate": 0.1}
    assert read_config(path) == "[run]\nname = 'x'\n"
    assert (path / "tokenizer" / "deeper" / "vocabulary").read_text() == "abc"
    manifest = read_manifest(path)
    assert (manifest["step"], manifest["world_size"], manifest["layout"]) == (3, 2, {"tp": 2})
    assert manifest["versions"]["torch"] == torch.__version__
    found = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
    assert found == {"manifest.json", *manifest["files"]}
    assert tmp_path.name.encode() not in (path / ".metadata").read_bytes()


def save_step_zero(rank: int, world: int, folder: str) -> None:
    checkpoints = Checkpoints(Path(folder), mode="sync")
    save_value(checkpoints, 0, value=4.0)
    assert checkpoints.latest() == 0 and loaded_value(checkpoints, 0) == 4.0


def test_r5_a_checkpoint_of_step_zero_is_like_any_other(tmp_path):
    run_ranks(save_step_zero, 2, str(tmp_path))


def set_aside(rank: int, world: int, folder: str) -> list[str]:
    checkpoints = Checkpoints(Path(folder), keep_last=0, mode="async")
    for step in (1, 2, 3):
        save_value(checkpoints, step)
    aside = checkpoints.set_aside_after(1)
    save_value(checkpoints, 2, value=20.0)
    checkpoints.wait()
    assert checkpoints.latest() == 2 and loaded_value(checkpoints, 2) == 20.0
    assert checkpoints.set_aside_after(1) == [".aside-step-00000002.1"]
    return aside


def test_checkpoints_of_an_abandoned_history_are_set_aside(tmp_path):
    aside = run_ranks(set_aside, 2, str(tmp_path))
    assert aside == [[".aside-step-00000002", ".aside-step-00000003"]] * 2
    assert names(tmp_path) == [
        *aside[0][:1],
        ".aside-step-00000002.1",
        ".aside-step-00000003",
        "step-00000001",
    ]


def quiet(rank: int, world: int, folder: str) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoints = Checkpoints(Path(folder), mode="async")
        save_value(checkpoints, 1)
        checkpoints.wait()
        assert checkpoints.latest() == 1 and loaded_value(checkpoints, 1) == 1.0
    assert [str(warning.message) for warning in caught] == []
    assert [record.getMessage() for record in records] == []


@pytest.mark.parametrize("world", [1, 2])
def test_nothing_is_logged_without_a_problem(world, tmp_path):
    run_ranks(quiet, world, str(tmp_path))
