"""A moved, renamed or damaged run directory, or a mistaken start, keeps the run's identity."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from forge.checkpoint.folders import step_name
from tests.support.runs import Run, assert_same_history, refused


def start_by_config(run: Run, path: Path, *options: str, output_dir: Path) -> int:
    """Start only `train.py --config PATH`, for a run whose folders are relative."""
    run._options = [f"--config={path}", *options]
    run.path = output_dir
    return run()


@pytest.fixture
def moved(tmp_path: Path) -> tuple[Run, Path]:
    """Return a run of 6 steps, moved away, and its new folder."""
    run = Run(tmp_path / "old")
    assert run("--train.steps=6") == 0
    new = tmp_path / "new" / "renamed"
    new.parent.mkdir()
    run.path.rename(new)
    return run, new


def test_r7_the_config_of_a_moved_run_is_refused_with_the_resuming_command(moved, undisturbed) -> None:
    run, new = moved
    assert start_by_config(run, new / "config.toml", "--train.steps=10", output_dir=new) == 2
    output = run.output()
    command = f"--run.output_dir={new.parent} --run.name=renamed"
    assert f"add {command}" in output and output.count("forge: ") == 1
    assert not (new.parents[1] / "old" / "run").exists()
    assert (
        start_by_config(run, new / "config.toml", "--train.steps=10", *command.split(), output_dir=new) == 0
    )
    assert_same_history(run, undisturbed())


def test_r7_the_config_of_a_run_begins_another_run_under_a_new_name(tmp_path) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=2") == 0
    other = tmp_path / "other"
    assert start_by_config(run, run.path / "config.toml", "--run.name=other", output_dir=other) == 0
    assert run.events("fresh")


@pytest.mark.parametrize(
    ("option", "code"),
    [("--model.vocab_size=80", 2), ("--checkpoint.resume=absent", 2)],
    ids=["config", "path"],
)
def test_r8_a_refused_start_changes_nothing_but_the_reason(
    tmp_path, undisturbed, option: str, code: int
) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=6") == 0
    before, metrics, checkpoints = run.status(), run.metrics(), run.checkpoints()
    refused(run, option, code=code)
    after = run.status()
    assert "the last start was refused: " in after.pop("reason") and before.pop("reason")
    assert after.pop("cause") in ("changed_settings", "configuration")
    assert after.pop("refused") == code
    assert after == before and run.metrics() == metrics and run.checkpoints() == checkpoints
    assert run.events("failed")[-1]["step"] == 6
    assert "new history" not in run.log()
    assert run() == 0
    assert_same_history(run, undisturbed())


def test_r8_a_refused_start_of_a_killed_run_reports_failed_at_its_last_step(tmp_path) -> None:
    run = Run(tmp_path)
    assert run(fault="step:7:0") == -signal.SIGKILL
    step = run.status()["step"]
    refused(run, "--model.vocab_size=80")
    status = run.status()
    assert (status["state"], status["step"], status["exit_code"]) == ("failed", step, 2) and step > 0


def test_r8_a_damaged_origin_record_is_ignored_if_unneeded(tmp_path, undisturbed) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=6") == 0
    (run.path / "origin.json").write_bytes(b"\x00{")
    assert run() == 0
    assert_same_history(run, undisturbed())


@pytest.mark.parametrize(
    "content", [b"\x00[", *(pytest.param(one, marks=pytest.mark.slow) for one in (b'{"a": 1}', b"[1]"))]
)
def test_r8_a_damaged_record_of_roll_backs_is_one_sentence(tmp_path, content: bytes) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=6") == 0
    (run.path / "rollbacks.json").write_bytes(content)
    assert "rollbacks.json cannot be read as JSON; remove this file" in refused(run)
    (run.path / "rollbacks.json").unlink()
    assert run() == 0


def test_s11_lines_lost_in_a_crash_are_reported_at_the_resume(tmp_path) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=6") == 0
    path = run.path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + bytes(300))
    assert run("--train.steps=8") == 0
    log = run.log()
    assert "ends in zero bytes" in log and "lacks the training lines of steps 4 to 6" in log
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 7, 8]
    assert run("--train.steps=10") == 0
    assert run.log().count("lacks the training lines") == 1


@pytest.mark.planted()
def test_s11_metrics_and_events_are_on_disk_before_the_manifest_of_their_step(tmp_path) -> None:
    """In the recorded calls, each file is synced after the step's last line and before the manifest."""
    run = Run(tmp_path, "--checkpoint.mode=sync")
    assert run.start("--train.steps=4", patch="tests.faults.test_moved_runs:record_syncs").join() == [0]
    calls = json.loads((run.path / "calls.json").read_text())
    for step in (2, 4):
        manifest = calls.index(f"manifest of {step_name(step)}")
        before = calls[:manifest]
        for name in ("metrics.jsonl", "events.jsonl"):
            last = max(n for n, call in enumerate(before) if call == f"fsync {name}")
            assert f"write {name}" not in before[last:] or name == "events.jsonl"
            assert f"write {name}" in before[:last]


def record_syncs() -> None:
    """Record writes and syncs of .jsonl files, and renames of checkpoint manifests."""
    import os

    from forge.checkpoint import commit

    calls: list[str] = []
    write, fsync, replace = os.write, os.fsync, commit.replace_atomically
    out = Path(os.environ["RUN_UNDER_TEST"]) / "calls.json"

    def name(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    def write_and_record(descriptor, data):
        if name(descriptor).endswith(".jsonl"):
            calls.append(f"write {name(descriptor)}")
        return write(descriptor, data)

    def sync_and_record(descriptor):
        if name(descriptor).endswith(".jsonl"):
            calls.append(f"fsync {name(descriptor)}")
        fsync(descriptor)

    def replace_and_record(path, content):
        if path.name == "manifest.json":
            calls.append(f"manifest of {path.parent.name.removeprefix('.partial-')}")
            out.write_text(json.dumps(calls))
        replace(path, content)

    os.write, os.fsync, commit.replace_atomically = write_and_record, sync_and_record, replace_and_record


def test_r7_a_moved_run_with_its_checkpoints_left_behind_is_refused(moved) -> None:
    run, new = moved
    shutil.rmtree(new / "checkpoints")
    command = [f"--run.output_dir={new.parent}", "--run.name=renamed"]
    assert start_by_config(run, new / "config.toml", *command, output_dir=new) == 77
    assert "has saved step 6" in run.output()


def test_r8_a_new_history_does_not_begin_with_weights_that_it_would_set_aside(tmp_path) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=4") == 0
    before = run.checkpoints()
    own = f"--checkpoint.init={run.path / 'checkpoints' / before[-1]}"
    refused(run, "--checkpoint.resume=none", own)
    assert "is a checkpoint of this run" in run.status()["reason"] and run.checkpoints() == before
