"""Full, read-only and slow disks, damaged files, and two runs in one directory."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from forge.checkpoint.folders import step_name
from tests.support import mounts
from tests.support.runs import Run, assert_same_history, flip_a_bit, wait_for

Usage = namedtuple("Usage", "total used free")

namespaces = pytest.mark.skipif(
    "not __import__('tests.support.mounts', fromlist=['_']).allowed()",
    reason="this machine forbids user namespaces, so no small or read-only file system can be made",
)


def test_s1_after_a_flipped_bit_the_run_resumes_from_the_previous_checkpoint(tmp_path, undisturbed) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=6", world=2) == 0
    flip_a_bit(run, 6)
    assert run(world=2) == 0
    [fallback] = run.events("fallback")
    assert "wrong checksum" in fallback["problem"] and fallback["problem"] in run.log()
    assert run.events("resumed")[0]["step"] == 4
    assert run.checkpoints() == [".damaged-step-00000006", *map(step_name, (6, 8, 10))]
    assert run.metrics() == undisturbed(world=2).metrics()


@pytest.mark.planted("no_checkpoint")
def test_s1_with_only_damaged_checkpoints_a_start_exits_77_with_one_sentence(tmp_path) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=4") == 0
    for step in (2, 4):
        flip_a_bit(run, step)
    assert run() == 77
    # The run is still finished; only the reason comes from the refused start.
    status = run.status()
    assert (status["state"], status["step"]) == ("finished", 4) and "is damaged" in status["reason"]
    assert run.events("failed")[-1]["exit_code"] == 77
    assert "Traceback" not in run.output() and run.output().count("forge: ") == 1


# A little more than a checkpoint of the tests' model.
ONE = 450_000


@namespaces
@pytest.mark.parametrize("quota", [False, True], ids=["foreseen", "met while writing"])
def test_s2_a_full_disk_costs_saves_and_not_the_run_until_too_many_fail(tmp_path, quota: bool) -> None:
    """Room for one checkpoint: after the first one, every save fails."""
    run = Run(tmp_path, "--train.steps=20", "--checkpoint.max_failed_saves=3", "--checkpoint.keep_last=1")
    patch = f"tests.faults.test_storage:{'room_for_one_by_quota' if quota else 'room_for_one'}"
    (run.path / "checkpoints").mkdir(parents=True)
    assert run.start(patch=patch).join() == [1]
    assert [event["step"] for event in run.events("saved")] == [2]
    failures = run.events("save_failed")
    assert [event["step"] for event in failures] == [4, 6, 8]
    assert all(("No space left" if quota else "are free") in event["error"] for event in failures)
    status = run.status()
    assert status["state"] == "failed" and "checkpoint.max_failed_saves = 3" in status["reason"]
    # Two saves after the last successful one, training still continued.
    assert run.metrics()[-1]["step"] >= 8 and "Traceback" not in run.output()
    assert (run.path / "left.txt").read_text() == step_name(2)


@namespaces
def test_s2_a_save_is_tried_again_at_the_next_interval(tmp_path, undisturbed) -> None:
    """The file that fills the disk disappears before step 6, and the history equals an undisturbed run's."""
    run = Run(tmp_path)
    (run.path / "checkpoints").mkdir(parents=True)
    assert run.start(patch="tests.faults.test_storage:full_until_step_6").join() == [0]
    assert [event["step"] for event in run.events("save_failed")] == [2, 4]
    assert [event["step"] for event in run.events("saved")] == [6, 8, 10]
    assert run.metrics() == undisturbed().metrics()


@namespaces
@pytest.mark.parametrize("keep_last", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_s2_a_full_disk_is_cured_by_a_lower_keep_last(tmp_path, undisturbed, keep_last: int) -> None:
    """Three checkpoints fill the disk. Pruning before the next save makes room and always keeps the newest one."""
    run = Run(tmp_path, "--checkpoint.keep_last=0", "--checkpoint.max_failed_saves=2")
    (run.path / "checkpoints").mkdir(parents=True)
    patch = "tests.faults.test_storage:room_for_three_that_are_kept"
    assert run.start(patch=patch).join() == [1]
    assert (run.path / "left.txt").read_text().split() == [step_name(step) for step in (2, 4, 6)]
    assert run.start(f"--checkpoint.keep_last={keep_last}", patch=patch).join() == [0]
    last = [step_name(step) for step in (8, 10)][-keep_last:]
    assert (run.path / "left.txt").read_text().split() == last
    assert "removing old ones" in run.log()
    assert run.metrics() == undisturbed().metrics()


def test_s10_unremovable_leftovers_cost_a_warning_and_no_save(tmp_path, undisturbed) -> None:
    """NFS's .nfs* files cannot be removed while a process has them open. Here the leftover's folder is a mount point."""
    run = Run(tmp_path)
    assert run("--train.steps=4") == 0
    patch = "tests.faults.test_storage:leftovers_that_stay"
    assert run.start(patch=patch).join() == [0]
    assert [event["step"] for event in run.events("saved")] == [2, 4, 6, 8, 10] and not run.events(
        "save_failed"
    )
    # Once for each leftover. The partial folder is renamed before its removal.
    assert run.log().count("which stays for now") == 3
    assert run.metrics() == undisturbed().metrics()


@pytest.mark.planted("save_failed")
def test_s2_a_limit_of_file_sizes_is_named_as_the_cause(tmp_path) -> None:
    """PyTorch's archive writer hides the system's error."""
    run = Run(tmp_path, "--checkpoint.max_failed_saves=1")
    assert run.start(patch="tests.faults.test_storage:small_files_only").join() == [1]
    assert "writing tensors failed on rank 0: OSError: [Errno 27] File too large" in run.status()["reason"]


def small_files_only() -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def leftovers_that_stay() -> None:
    """Make a leftover of a pruned checkpoint and one of the next save's own partial folder."""
    for name in (f".pruned-{step_name(2)}", f".partial-{step_name(6)}"):
        held = _folder() / name / "held"
        held.mkdir(parents=True)
        mounts.small(held, 4096)


def room_for_three_that_are_kept() -> None:
    """Mount a small disk, and copy its content in and out, so it outlives the process."""
    import forge.run.launch as launch

    folder, kept = _folder(), _folder().with_name("kept")
    mounts.small(folder, 3 * ONE + ONE // 2)
    if kept.exists():
        shutil.copytree(kept, folder, dirs_exist_ok=True)
    begin = launch.run

    def run_and_keep(*arguments):
        try:
            return begin(*arguments)
        finally:
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept)
            (folder.parent / "left.txt").write_text(" ".join(sorted(os.listdir(folder))))

    launch.run = run_and_keep


def room_for_one() -> None:
    """Mount a disk for one checkpoint. At exit, list the remaining checkpoints in left.txt."""
    import forge.run.launch as launch

    folder = _folder()
    mounts.small(folder, ONE + ONE // 2)
    begin = launch.run

    def run_and_list(*arguments):
        try:
            return begin(*arguments)
        finally:
            (folder.parent / "left.txt").write_text(" ".join(sorted(os.listdir(folder))))

    launch.run = run_and_list


def room_for_one_by_quota() -> None:
    """Limit the disk by a quota, which statvfs does not show."""
    room_for_one()
    shutil.disk_usage = lambda path: Usage(10**12, 0, 10**12)


def full_until_step_6() -> None:
    import forge.run.save as save

    folder = _folder()
    mounts.small(folder, 4 * ONE)
    filler = folder / "filler"
    filler.write_bytes(bytes(4 * ONE - ONE // 2))
    begin = save.Saves.save

    def save_with_room_from_6(self):
        if self._trainer.progress.step == 6:
            filler.unlink()
        begin(self)

    save.Saves.save = save_with_room_from_6


# The run with enough space also rolls back.
@pytest.mark.slow
@pytest.mark.planted("disk_full", "bad_steps")
@pytest.mark.parametrize("what", ["rollbacks.json", "metrics.jsonl"])
def test_s2_a_full_disk_in_a_rollback_ends_all_ranks_with_one_sentence(tmp_path, what: str) -> None:
    """A rerun of the same command gives the history of a run with enough space."""
    options, patch = "--resilience.max_skipped_steps=3", "tests.support.spoil:samples_32_to_55"
    run, whole = Run(tmp_path / "run", options), Run(tmp_path / "whole", options)
    full = f"tests.faults.test_storage:no_room_for_{what.partition('.')[0]}_in_a_rollback"
    assert run.start(world=2, patch=full).join() == [1, 1]
    reason = run.status()["reason"]
    assert "No space left on device" in reason and what in reason and "no answer" not in reason
    assert "Traceback" not in run.output()
    assert run.start(world=2, patch=patch).join() == whole.start(world=2, patch=patch).join() == [0, 0]
    assert_same_history(run, whole)


def no_room_for_rollbacks_in_a_rollback() -> None:
    import forge.run.rollback as rollback

    _no_room_in_a_rollback(rollback)


def no_room_for_metrics_in_a_rollback() -> None:
    import forge.observe.json_lines as json_lines

    _no_room_in_a_rollback(json_lines)


def _no_room_in_a_rollback(module: Any) -> None:
    from tests.support import spoil

    spoil.samples_32_to_55()

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    module.replace_atomically = refuse


def _folder() -> Path:
    return Path(os.environ["RUN_UNDER_TEST"]) / "checkpoints"


@namespaces
def test_s3_a_read_only_output_directory_is_reported_at_the_start(tmp_path) -> None:
    run = Run(tmp_path)
    (run.path / "checkpoints").mkdir(parents=True)
    assert run.start(patch="tests.faults.test_storage:read_only_checkpoints").join() == [2]
    output = run.output()
    assert "cannot be written to (Read-only file system)" in output and "run.output_dir" in output
    assert "Traceback" not in output and not (run.path / "metrics.jsonl").exists()


def read_only_checkpoints() -> None:
    mounts.read_only(_folder())


@namespaces
@pytest.mark.parametrize("how", ["small", pytest.param("read_only", marks=pytest.mark.slow)])
def test_s3_an_unshared_output_directory_is_reported_at_the_start(tmp_path, how: str) -> None:
    """Rank 1 acts as another node, with its own disk, or a read-only one, in place of rank 0's run directory."""
    run = Run(tmp_path)
    (run.path / "checkpoints").mkdir(parents=True)
    codes = run.start(world=2, patch=f"tests.faults.test_storage:{how}_on_another_node").join()
    assert codes == [2, 2]
    expected = "a file system that all nodes share" if how == "small" else "Read-only file system"
    assert expected in run.output() and "Traceback" not in run.output()


def small_on_another_node() -> None:
    if os.environ["RANK"] == "1":
        os.environ["LOCAL_RANK"] = "0"
        mounts.small(_folder().parent, ONE)


def read_only_on_another_node() -> None:
    if os.environ["RANK"] == "1":
        os.environ["LOCAL_RANK"] = "0"
        mounts.read_only(_folder())


def test_s4_an_error_in_the_background_reaches_all_ranks_at_the_next_save(tmp_path, undisturbed) -> None:
    run = Run(tmp_path)
    assert run(world=2, fault="save.between_shards:4:1:raise") == 0
    [failed] = run.events("save_failed")
    assert failed["step"] == 4 and "rank 1" in failed["error"]
    for rank in (0, 1):
        log = run.log(rank)
        assert "saving step 4 failed" in log and "injected by FORGE_FAULT" in log
        assert log.index("saving step 4 failed") < log.index("saved step 6")
    assert run.metrics() == undisturbed(world=2).metrics()
    assert step_name(4) not in run.checkpoints() and step_name(6) in run.checkpoints()


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_s4_failures_in_a_row_end_all_ranks(tmp_path, mode: str) -> None:
    run = Run(tmp_path, "--checkpoint.max_failed_saves=2", f"--checkpoint.mode={mode}")
    assert run(world=2, fault="save.between_shards:*:1:raise") == 1
    reason = run.status()["reason"]
    assert "2 saves in a row have failed (checkpoint.max_failed_saves = 2)" in reason and "rank 1" in reason
    assert [event["step"] for event in run.events("save_failed")] == [2, 4]
    assert run.output().count("saving step 4 failed") == 1 and "Traceback" not in run.output()


def test_s4_without_a_limit_a_run_continues_and_fails_only_at_its_last_save(tmp_path, undisturbed) -> None:
    run = Run(tmp_path, "--checkpoint.max_failed_saves=0")
    assert run(world=2, fault="save.between_shards:*:1:raise") == 1
    assert run.metrics() == undisturbed(world=2).metrics()
    assert "saving the last checkpoint (step 10) failed" in run.status()["reason"]


@pytest.mark.planted("save_failed", "stopped")
def test_s4_the_last_save_is_tried_again_when_it_failed_in_the_background(tmp_path, undisturbed) -> None:
    """A signal in step 5 stops the run after step 6, whose background save is running by then and will fail."""
    run = Run(tmp_path)
    patch = "tests.faults.test_storage:first_save_of_step_6_fails"
    assert run.start(world=2, patch=patch, fault="step:5:0:signal").join() == [75, 75]
    assert [event["step"] for event in run.events("save_failed")] == [6]
    assert run.checkpoints()[-1] == step_name(6)
    assert run(world=2) == 0
    assert_same_history(run, undisturbed(world=2))


def first_save_of_step_6_fails() -> None:
    import forge.checkpoint.commit as commit

    complete, failed = commit._complete, []

    def fail_once(partial, final, contents, parts):
        if contents.step == 6 and not failed:
            failed.append(True)
            raise OSError("not this time")
        complete(partial, final, contents, parts)

    commit._complete = fail_once


def test_s6_a_second_run_on_the_same_directory_is_refused_and_names_the_first(tmp_path) -> None:
    run = Run(tmp_path, "--train.steps=100000")
    ranks = run.start()
    wait_for(lambda: run.stepping)
    assert run(world=2) == 2  # on every worker, so srun and the job script see it
    assert f"process {ranks.pids[0]} on" in run.output()
    os.kill(ranks.pids[0], signal.SIGTERM)
    assert ranks.join() == [75]
    assert run.status()["state"] == "stopped"


@pytest.mark.planted("killed")
def test_s6_the_lock_of_a_killed_run_is_taken_over_and_its_holder_named(tmp_path, undisturbed) -> None:
    run = Run(tmp_path)
    ranks = run.start(fault="step:5:0")
    assert ranks.join() == [-signal.SIGKILL]
    assert run() == 0
    assert f"taking over the stale lock of process {ranks.pids[0]} on" in run.output()
    assert_same_history(run, undisturbed())
