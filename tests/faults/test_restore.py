"""A run without its checkpoints: restored from the mirror, or refused. It never silently restarts from step 0."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from forge.checkpoint.folders import step_name
from forge.checkpoint.mirror import copied_steps, restore
from forge.runtime import remote
from forge.runtime.errors import UserError
from tests.support import mounts
from tests.support.runs import Run, assert_same_history, flip_a_bit, refused, tensor_files, wait_for

namespaces = pytest.mark.skipif(
    "not __import__('tests.support.mounts', fromlist=['_']).allowed()",
    reason="this machine forbids user namespaces, so no small file system can be made",
)


def mirrored(folder: Path, *options: str) -> tuple[Run, Path]:
    """Return a run of 6 steps with checkpoints 2, 4 and 6, and the folder of its mirror."""
    run = Run(
        folder,
        f"--checkpoint.mirror=file://{folder}/mirror",
        "--checkpoint.mode=sync",
        "--run.seed=1",
        *options,
    )
    assert run("--train.steps=6") == 0, run.output()
    return run, folder / "mirror" / "run"


def lose(run: Run) -> None:
    """Remove the run directory, as if a node's disk were lost."""
    shutil.rmtree(run.path)


def copies(mirror: Path) -> list[int]:
    return json.loads((mirror / "mirror.json").read_text())["steps"]


@pytest.mark.parametrize("way", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.planted("stopped"))])
def test_s7_an_interrupted_restore_is_restarted_and_the_mirror_stays_whole(
    tmp_path, undisturbed, way: str
) -> None:
    run, mirror = mirrored(tmp_path)
    before = copies(mirror)
    assert before[-1] == 6
    lose(run)
    log = run.path / "logs" / "rank-0.log"
    for turn in (1, 2):
        ranks = run.start(fault=f"mirror.restore:6:0:{'kill' if way == 'SIGKILL' else 'sleep'}")
        if way == "SIGTERM":
            # All starts append to the same log.
            wait_for(lambda turn=turn: log.exists() and log.read_text().count("restoring step 6") == turn)
            ranks.processes[0].terminate()
        assert ranks.join() == [-signal.SIGKILL if way == "SIGKILL" else 75]
        assert run.checkpoints() == [f".partial-{step_name(6)}"] and copies(mirror) == before
    assert run() == 0
    assert run.events("resumed")[-1]["step"] == 6 and not run.events("fresh")
    assert tensor_files(run, 10) == tensor_files(undisturbed("--run.seed=1"), 10)
    assert run.losses() == undisturbed("--run.seed=1").losses()[6:]


@namespaces
@pytest.mark.planted("disk_full")
def test_s7_a_restore_larger_than_the_disk_is_refused_before_a_byte_is_fetched(tmp_path) -> None:
    run, mirror = mirrored(tmp_path)
    before = copies(mirror)
    lose(run)
    (run.path / "checkpoints").mkdir(parents=True)
    assert run.start(patch="tests.faults.test_restore:little_room").join() == [1]
    assert "restoring step 6 failed" in run.output() and "are free" in run.output()
    assert "attempt" not in run.output() and "Traceback" not in run.output()
    assert copies(mirror) == before
    assert run() == 0 and run.events("resumed")[-1]["step"] == 6


def little_room() -> None:
    import os

    mounts.small(Path(os.environ["RUN_UNDER_TEST"]) / "checkpoints", 200_000)


@pytest.mark.parametrize("steps", [[6], [2, 4, 6]], ids=["the newest", "all"])
@pytest.mark.planted("fallback")
def test_s7_a_damaged_checkpoint_is_restored_from_its_copy(tmp_path, undisturbed, steps: list[int]) -> None:
    run, mirror = mirrored(tmp_path, "--checkpoint.keep_last=0")
    for step in steps:
        flip_a_bit(run, step)
    assert run() == 0, run.output()
    assert run.events("resumed")[-1]["step"] == 6 and len(run.events("fallback")) == len(steps)
    assert copies(mirror) == [2, 4, 6, 8, 10]
    assert tensor_files(run, 10) == tensor_files(undisturbed("--run.seed=1"), 10)


@pytest.mark.planted("configuration")
def test_s7_a_new_history_does_not_overwrite_the_copies_of_another(tmp_path) -> None:
    run, mirror = mirrored(tmp_path)
    lose(run)
    output = refused(run, "--checkpoint.resume=none")
    assert (
        "checkpoint.mirror" in output
        and "of an earlier run under this name" in output
        and "another run.name" in output
    )
    assert copies(mirror)[-1] == 6 and not run.events("fresh")


@pytest.mark.planted()
def test_s7_a_run_with_a_mirror_goes_back_to_its_own_checkpoint(tmp_path) -> None:
    run, mirror = mirrored(tmp_path, "--checkpoint.keep_last=0")
    own = run.path / "checkpoints" / step_name(4)
    assert run(f"--checkpoint.resume={own}") == 0, run.output()
    assert run.events("resumed")[-1]["step"] == 4 and copies(mirror) == [2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    "kept", ["status and events", pytest.param("events", marks=pytest.mark.slow), "status", "metrics"]
)
def test_s8_vanished_checkpoints_are_exit_77_and_nothing_is_deleted(tmp_path, undisturbed, kept: str) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=6") == 0
    away = tmp_path / "away"
    (run.path / "checkpoints").rename(away)
    for name in ("status.json", "events.jsonl"):
        if name.partition(".")[0] not in kept:
            (run.path / name).unlink()
    metrics = (run.path / "metrics.jsonl").read_bytes()
    output = refused(run, code=77)
    assert "holds no checkpoint, but the run has saved step 6" in output and "another run.name" in output
    assert (run.path / "metrics.jsonl").read_bytes() == metrics and not run.events("fresh")[1:]
    # The folder returns, e.g. after a mount.
    (run.path / "checkpoints").rmdir()
    away.rename(run.path / "checkpoints")
    assert run() == 0
    assert_same_history(run, undisturbed())


@pytest.mark.planted("killed")
def test_s8_a_run_killed_before_its_first_save_starts_again(tmp_path, undisturbed) -> None:
    run = Run(tmp_path)
    assert run(fault="step:2:0") == -signal.SIGKILL
    assert run() == 0
    assert_same_history(run, undisturbed())


@pytest.mark.parametrize("content", [None, "no such key = 1"], ids=["missing", "refused"])
@pytest.mark.planted("changed_settings")
def test_s8_checkpoints_of_unknown_settings_are_not_set_aside(tmp_path, content: str | None) -> None:
    run = Run(tmp_path, "--checkpoint.resume=none")
    assert run(fault="step:5:*:signal") == 75
    before = run.checkpoints()
    (run.path / "config.toml").unlink()
    if content is not None:
        (run.path / "config.toml").write_text(content)
    output = refused(run)
    assert "forge cannot tell whether this start has the same settings" in output
    assert run.checkpoints() == before
    stopped = run.events("stopped")[0]["step"]
    assert run("--checkpoint.resume=auto") == 0 and run.events("resumed")[-1]["step"] == stopped


@pytest.mark.planted("killed")
def test_s8_a_new_history_without_a_save_starts_again(tmp_path) -> None:
    """The saves in events.jsonl belong to the previous history."""
    run = Run(tmp_path)
    assert run("--train.steps=4") == 0
    assert run("--checkpoint.resume=none", fault="step:2:0") == -signal.SIGKILL
    assert run("--checkpoint.resume=none") == 0
    assert [event["event"] for event in run.events() if event["event"] in ("fresh", "resumed")] == [
        "fresh"
    ] * 3


def test_s9_a_missing_or_unreadable_index_is_rebuilt_from_the_manifests(tmp_path, caplog) -> None:
    run, mirror = mirrored(tmp_path)
    expected = copies(mirror)
    for content in (None, "not json", "[]"):
        (mirror / "mirror.json").unlink(missing_ok=True)
        if content is not None:
            (mirror / "mirror.json").write_text(content)
        assert copied_steps(f"file://{mirror}") == expected
    assert "rebuilt from the manifests" in caplog.text
    lose(run)
    assert run() == 0 and run.events("resumed")[0]["step"] == 6
    assert copies(mirror)[-1] == 10


@pytest.mark.planted()
def test_s9_a_store_refusing_the_newest_copy_stops_the_run_and_deletes_no_copy(tmp_path, monkeypatch) -> None:
    _, mirror = mirrored(tmp_path)
    store = remote.filesystem_of("file://x")
    original = type(store).info

    def info(self, path, **options):
        if step_name(6) in str(path) and ".distcp" in str(path):
            raise PermissionError(13, "the token has expired")
        return original(self, path, **options)

    monkeypatch.setattr(type(store), "info", info)
    with pytest.raises(
        UserError, match=r"restoring step 6 failed.*the token has expired.*unchanged"
    ) as error:
        restore(f"file://{mirror}", tmp_path / "new")
    assert error.value.exit_code == 1
    monkeypatch.undo()
    assert copies(mirror)[-1] == 6
    assert restore(f"file://{mirror}", tmp_path / "new") == 6


@pytest.mark.planted()
def test_s9_copies_of_rolled_back_steps_are_not_in_a_rebuilt_index(tmp_path) -> None:
    from forge.checkpoint.mirror import Mirror

    run, mirror = mirrored(tmp_path)
    url = f"file://{mirror}"
    one = Mirror(url, run.path / "checkpoints", 0, 0)
    one.forget_after(4)
    one.close()
    (mirror / "mirror.json").unlink()
    assert copied_steps(url)[-1] == 4
