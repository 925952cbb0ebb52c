"""A run's local states: their folder, their removal, and reported failures."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge.checkpoint.folders import step_name, steps
from forge.run.tiers import Tiers
from forge.runtime.causes import Cause
from forge.runtime.distributed import RanksFailed
from forge.runtime.private import MARKER, PrivateFolder
from tests.support import mounts
from tests.support.runs import Run

# At the end, the node's local states are newer than the run's checkpoint.
LOCAL = ["--checkpoint.local_interval=2", "--checkpoint.interval=6"]


def kept(folder: Path, *options: str) -> tuple[Run, Path, str]:
    """Return a run, the folder of its local states, and the option that names the folder."""
    place = folder / "place"
    return Run(folder, *LOCAL, *options), place, f"--checkpoint.local_dir={place}"


def killed(run: Run, place: str, step: int = 6) -> None:
    assert run.start(place, fault=f"step:{step}:0").join() == [-signal.SIGKILL]


def entries(place: Path) -> list[str]:
    return sorted(os.listdir(place))


def test_local_states_are_in_a_private_folder_until_the_run_has_finished(tmp_path) -> None:
    run, place, option = kept(tmp_path)
    killed(run, option)
    assert place.stat().st_mode & 0o777 == 0o700
    [name] = [name for name in entries(place) if name != MARKER]
    [history] = (place / name).iterdir()
    newest = steps(history)[-1]
    assert run(option) == 0
    assert run.events("resumed")[0]["step"] == newest
    assert entries(place) == [MARKER]


@pytest.mark.parametrize("names_the_folder", [True, False])
def test_a_start_without_local_states_removes_those_of_earlier_starts(tmp_path, names_the_folder) -> None:
    run, place, option = kept(tmp_path)
    killed(run, option)
    assert len(entries(place)) == 2
    assert run("--checkpoint.local_interval=0", *([option] if names_the_folder else [])) == 0
    assert entries(place) == [MARKER]


def test_a_finished_run_killed_before_the_removal_of_its_states_removes_them_at_the_next_start(
    tmp_path,
) -> None:
    run, place, option = kept(tmp_path, "--train.steps=6", "--checkpoint.interval=6")
    killed(run, option)
    assert run("--checkpoint.local_interval=0") == 0
    leftover = PrivateFolder(place, "key").make(name_of(run), (run.path / "local-states").read_text()[:8])
    (leftover / "step-00000004").mkdir()
    assert run(option) == 0
    assert entries(place) == [MARKER]


def test_states_of_an_abandoned_branch_are_not_continued(tmp_path) -> None:
    run, place, option = kept(tmp_path, "--checkpoint.interval=4", "--checkpoint.mode=sync")
    killed(run, option, step=8)
    # The next start is on another node, which has no states.
    absent = place.rename(tmp_path / "absent")
    killed(run, option, step=6)
    shutil.rmtree(place)
    absent.rename(place)
    assert run(option) == 0
    assert [event["step"] for event in run.events("resumed")] == [4, 4]


def test_states_stay_obsolete_after_a_start_without_local_states(tmp_path) -> None:
    run, place, option = kept(tmp_path, "--checkpoint.interval=4", "--checkpoint.mode=sync")
    killed(run, option, step=8)
    absent = place.rename(tmp_path / "absent")
    assert run.start("--checkpoint.local_interval=0", fault="step:6:0").join() == [-signal.SIGKILL]
    absent.rename(place)
    assert run(option) == 0
    assert [event["step"] for event in run.events("resumed")] == [4, 4]


def test_a_refused_start_keeps_the_states(tmp_path) -> None:
    run, _, option = kept(tmp_path)
    other = Run(tmp_path / "other", "--train.steps=4", "--checkpoint.interval=2")
    assert other() == 0
    killed(run, option)
    newest = steps(next((tmp_path / "place" / name_of(run)).iterdir()))[-1]
    wrong = f"--checkpoint.resume={other.path / 'checkpoints' / step_name(2)}"
    assert run(option, wrong, '--data.sources=[{path="absent"}]') == 2
    assert run("--checkpoint.local_interval=0", '--data.sources=[{path="absent"}]') == 2
    assert run(option) == 0
    assert run.events("resumed")[0]["step"] == newest


def test_a_refused_start_from_a_state_advises_a_checkpoint_that_a_new_run_can_load(tmp_path) -> None:
    options = ["--checkpoint.interval=4", "--checkpoint.mode=sync", "--checkpoint.local_interval=1"]
    run, place, option = kept(tmp_path, *options)
    killed(run, option, step=8)  # a save waits for the one before it, so the state of step 6 is complete
    advice = f"with checkpoint.init = '{run.path / 'checkpoints' / step_name(4)}'"
    for change in (
        "--run.seed=9",
        '--data.sources=[{path="synthetic",weight=1.0},{path="synthetic",weight=2.0}]',
    ):
        assert run(option, change) == 2
        assert f"{place}/{name_of(run)}/" in run.output() and advice in run.output()


def test_a_state_is_continued_if_the_newest_checkpoint_is_damaged(tmp_path) -> None:
    run, place, option = kept(tmp_path, "--checkpoint.interval=4", "--checkpoint.mode=sync")
    killed(run, option, step=10)
    next((run.path / "checkpoints" / step_name(8)).glob("*.distcp")).write_bytes(b"")
    [history] = (place / name_of(run)).iterdir()
    newest = steps(history)[-1]
    assert run(option) == 0
    assert [event["step"] for event in run.events("resumed")] == [newest] != [4]
    assert run.events("fallback")


def test_a_stop_requested_in_a_step_with_a_local_save_saves_a_checkpoint(tmp_path) -> None:
    run, _, option = kept(tmp_path, "--checkpoint.local_interval=1", "--checkpoint.interval=100")
    assert run.start(option, fault="step:4:*:signal").join() == [75]
    assert steps(run.path / "checkpoints")[-1] >= 4


def test_a_state_of_the_last_step_becomes_a_checkpoint(tmp_path) -> None:
    """The user lowers train.steps after a kill."""
    run, place, option = kept(tmp_path, "--checkpoint.mode=sync")
    killed(run, option)
    [history] = (place / name_of(run)).iterdir()
    newest = steps(history)[-1]
    assert newest not in steps(run.path / "checkpoints")
    assert run(option, f"--train.steps={newest}") == 0
    assert steps(run.path / "checkpoints")[-1] == newest and entries(place) == [MARKER]
    assert run.status()["state"] == "finished" and run.status()["step"] == newest
    assert run(option, f"--train.steps={newest + 2}") == 0
    assert run.events("resumed")[-1]["step"] == newest


def name_of(run: Run) -> str:
    return f"run-{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:8]}"


def test_x3_a_link_in_place_of_the_run_s_states_is_refused_and_not_followed(tmp_path) -> None:
    run, place, option = kept(tmp_path)
    home = tmp_path / "home"
    for name in ("deadbeef", "thesis"):
        (home / name).mkdir(parents=True)
    PrivateFolder(place, "key")
    (place / name_of(run)).symlink_to(home)
    assert run(option) != 0
    assert entries(home) == ["deadbeef", "thesis"]


def test_x3_an_untrusted_folder_is_refused_and_nothing_in_it_is_removed(tmp_path) -> None:
    run, place, option = kept(tmp_path)
    place.mkdir()
    place.chmod(0o777)
    (place / "deadbeef").mkdir()
    assert run(option) == 2
    assert "checkpoint.local_dir" in run.output() and "chmod 700" in run.output()
    assert entries(place) == ["deadbeef"]


@pytest.mark.parametrize(
    ("cause", "checkpoint", "discarded"),
    [(Cause.DISK_FULL, 4, [5]), (Cause.DISK_FULL, -1, []), (Cause.ERROR, 4, [])],
)
def test_a_state_without_room_on_a_node_is_discarded_if_there_is_a_checkpoint(
    cause: Cause, checkpoint: int, discarded: list[int]
) -> None:
    """Otherwise, each restart would choose the same state."""

    def fetch(step: int, names: set[str]) -> None:
        raise RanksFailed("making room for local states failed on rank 1", cause)

    reported: list[str] = []
    forgotten: list[int] = []
    local: Any = SimpleNamespace(fetch=fetch, forget_after=forgotten.append)
    reporter: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0), event=lambda kind, problem: reported.append(problem)
    )
    with pytest.raises(RanksFailed):
        object.__new__(Tiers)._fetch(local, 6, {"__0_0.distcp"}, checkpoint, reporter)
    assert forgotten == discarded and len(reported) == len(discarded)


def tiny_memory() -> None:
    """A patch for `Run.start`: put the folder of local states on a file system of 64 kB."""
    mounts.small(Path(os.environ["RUN_UNDER_TEST"]).parent / "memory", 1 << 16)


def test_e12_every_state_too_large_for_the_folder_is_reported_even_in_quick_succession(
    tmp_path,
) -> None:
    if not mounts.allowed():
        pytest.skip("no mount namespaces here")
    (tmp_path / "memory").mkdir()
    run = Run(tmp_path, "--checkpoint.local_interval=1", f"--checkpoint.local_dir={tmp_path}/memory/place")
    assert run.start(patch="tests.run.test_tiers:tiny_memory").join() == [0]
    assert [event["step"] for event in run.events("local_save_failed")] == list(range(1, 10))
    assert run.log().count("was not saved: ") == 9
