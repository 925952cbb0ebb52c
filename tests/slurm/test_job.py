"""What a turn of a Slurm job decides at its end, and what it reads from Slurm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from forge.config import load_config
from scripts.slurm.job import (
    JobHistory,
    RequeueLimits,
    RunSnapshot,
    count_stop,
    decide,
    main,
    time_left_s,
    time_limit,
)

LIMITS = RequeueLimits(restarts=0, failed_turns=2, turns_without_progress=3)
EMPTY = RunSnapshot("", frozenset())


def record(state: str, exit_code: int, *steps: int) -> RunSnapshot:
    return RunSnapshot(
        json.dumps({"state": state, "exit_code": exit_code}), frozenset((f"step-{n}", n) for n in steps)
    )


@pytest.mark.parametrize(
    ("after", "code", "action"),
    [
        (record("finished", 0, 10), 0, "end"),
        (record("finished", 0, 10), 143, "end"),
        (record("stopped", 75, 10), 75, "requeue"),
        (record("stopped", 75), 0, "requeue"),
        # Stopped before it had found its directory.
        (EMPTY, 75, "requeue"),
        # Ended by SIGTERM before it could handle one.
        (EMPTY, 143, "requeue"),
        # A node that was lost before the first save of the turn.
        (EMPTY, 137, "requeue"),
        (record("running", 0), 137, "requeue"),
        (record("failed", 1), 137, "requeue"),
        (record("failed", 2), 137, "end"),
        (record("running", 0), 139, "end"),
        (record("failed", 1, 10), 1, "requeue"),
        (record("running", 0, 10), 137, "requeue"),
        (record("failed", 1), 1, "end"),
        # What only a person can fix.
        (record("failed", 2, 10), 2, "end"),
        (record("failed", 77, 10), 77, "end"),
        (EMPTY, 2, "end"),
        # Another run has the directory, and was stopped or finished meanwhile.
        (record("stopped", 75, 10), 2, "end"),
        (EMPTY, 1, "end"),
        (EMPTY, 0, "end"),
    ],
)
def test_the_end_of_a_turn(after: RunSnapshot, code: int, action: str) -> None:
    assert decide(EMPTY, after, code, JobHistory("7"), LIMITS, 0)[0] == action


def test_the_status_of_an_earlier_turn_does_not_count() -> None:
    stopped = record("stopped", 75, 10)
    assert decide(stopped, stopped, 1, JobHistory("7"), LIMITS, 0)[0] == "end"


def turns(history: JobHistory, code: int, after: RunSnapshot, count: int) -> list[str]:
    return [decide(EMPTY, after, code, history, LIMITS, 0)[0] for _ in range(count)]


def test_turns_that_fail_and_turns_without_progress_are_limited() -> None:
    history = JobHistory("7")
    assert turns(history, 75, EMPTY, 3) == ["requeue", "requeue", "end"]
    history = JobHistory("7")
    assert turns(history, 137, record("running", 0), 3) == ["requeue", "requeue", "end"]
    history = JobHistory("7")
    assert turns(history, 1, record("failed", 1, 10), 3) == ["requeue", "requeue", "end"]


def test_a_turn_that_was_stopped_after_a_save_ends_both_counts() -> None:
    history = JobHistory("7", failed=2, without_progress=2)
    assert turns(history, 75, record("stopped", 75, 10), 1) == ["requeue"]
    assert history == JobHistory("7")


def test_a_failure_restarts_in_the_same_turn_as_often_as_is_allowed() -> None:
    limits = RequeueLimits(restarts=1, failed_turns=2, turns_without_progress=3)
    after = record("failed", 1)
    assert [decide(EMPTY, after, 1, JobHistory("7"), limits, done)[0] for done in (0, 1)] == [
        "restart",
        "end",
    ]


def stopped_turns(folder: Path, saves: Sequence[Sequence[int]]) -> list[int]:
    """Exit codes of `job.py stopped` after turns of an elastic job that have saved these steps."""
    codes = []
    for steps in saves:
        for step in steps:
            path = folder / "run" / "checkpoints" / f"step-{step:08}" / "manifest.json"
            path.parent.mkdir(parents=True)
            path.touch()
        argv = ["--config=debug.toml", "--run.name=run", f"--run.output_dir={folder}"]
        codes.append(count_stop(argv, {"SLURM_JOB_ID": "7"}))
    return codes


def test_an_elastic_job_ends_after_three_turns_without_progress(tmp_path) -> None:
    assert stopped_turns(tmp_path, [[], [], []]) == [75, 75, 1]


def test_a_new_checkpoint_of_an_elastic_job_ends_the_count(tmp_path) -> None:
    assert stopped_turns(tmp_path, [[10], [], [], [20, 30], [], [], []]) == [75, 75, 75, 75, 75, 75, 1]


def test_counts_are_of_one_job(tmp_path) -> None:
    path = tmp_path / "requeues.json"
    assert JobHistory.read(path, "7") == JobHistory("7")
    path.write_text('{"job": "7", "failed": 1, "without_progress": 2}')
    assert JobHistory.read(path, "7") == JobHistory("7", 1, 2)
    assert JobHistory.read(path, "8") == JobHistory("8")
    path.write_text("{")
    assert JobHistory.read(path, "7") == JobHistory("7")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("59\n", 59),
        ("5:00", 300),
        ("1:00:01", 3601),
        ("2-01:00:00", 49 * 3600),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_the_time_that_squeue_prints(text: str, seconds: int | None) -> None:
    assert time_left_s(text) == seconds


def test_the_sooner_of_two_limits_counts() -> None:
    config = load_config(["--config=debug.toml", "--resilience.time_limit_s=1000"])
    assert time_limit(config, 3600.0) == []
    assert time_limit(config, 600.0) == ["--resilience.time_limit_s=570"]
    assert time_limit(load_config(["--config=debug.toml"]), 60.0) == ["--resilience.time_limit_s=54"]


def test_a_login_node_checks_a_configuration_for_any_number_of_processes(capsys) -> None:
    assert main(["check", "16", "--config", "debug.toml"]) == 2
    assert "must be a multiple of micro_batch_size * dp_replicate" in capsys.readouterr().err
    assert main(["check", "8", "--config", "debug.toml"]) == 0
    assert main(["check", "--config", "debug.toml"]) == 2
