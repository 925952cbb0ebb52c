"""Decisions at the end of a Slurm job run, and the parsing of Slurm's output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from forge.config import load_config
from forge.run import hooks
from forge.runtime.errors import UserError
from scripts.slurm import job
from scripts.slurm.job import (
    JobHistory,
    RequeueLimits,
    RunSnapshot,
    count_stop,
    decide,
    main,
    time_left_s,
)

LIMITS = RequeueLimits(restarts=0, failed_turns=2, turns_without_progress=3)
EMPTY = RunSnapshot("", frozenset())


def record(state: str, exit_code: int, *steps: int, **more: object) -> RunSnapshot:
    status = {"state": state, "exit_code": exit_code, **more}
    return RunSnapshot(json.dumps(status), frozenset((f"step-{n}", n) for n in steps))


@pytest.mark.parametrize(
    ("after", "code", "action"),
    [
        (record("finished", 0, 10), 0, "end"),
        (record("finished", 0, 10), 143, "end"),
        (record("stopped", 75, 10), 75, "requeue"),
        (record("stopped", 75), 0, "requeue"),
        # A hook has stopped the run. It would stop each next job run, too.
        (record("stopped", 75, 10, final=True), 75, "end"),
        # Stopped before the run found its directory.
        (EMPTY, 75, "requeue"),
        # Ended by SIGTERM before the handler was installed.
        (EMPTY, 143, "requeue"),
        # A node lost before the job run's first save.
        (EMPTY, 137, "requeue"),
        (record("running", 0), 137, "requeue"),
        (record("failed", 1), 137, "requeue"),
        (record("failed", 2), 137, "end"),
        (record("running", 0), 139, "end"),
        (record("failed", 1, 10), 1, "requeue"),
        (record("running", 0, 10), 137, "requeue"),
        (record("failed", 1), 1, "end"),
        # Errors for a person to fix.
        (record("failed", 2, 10), 2, "end"),
        (record("failed", 77, 10), 77, "end"),
        (EMPTY, 2, "end"),
        # Another run holds the directory, and was stopped or finished meanwhile.
        (record("stopped", 75, 10), 2, "end"),
        (EMPTY, 1, "end"),
        (EMPTY, 0, "end"),
    ],
)
def test_the_end_of_a_job_run(after: RunSnapshot, code: int, action: str) -> None:
    assert decide(EMPTY, after, code, JobHistory("7"), LIMITS, 0)[0] == action


def test_the_status_of_an_earlier_job_run_does_not_count() -> None:
    stopped = record("stopped", 75, 10)
    assert decide(stopped, stopped, 1, JobHistory("7"), LIMITS, 0)[0] == "end"


def test_a_refused_start_of_a_stopped_run_is_not_requeued() -> None:
    """torchrun ends with 1, and status.json keeps the state of the start before."""
    before = record("stopped", 75, 10)
    status = json.loads(before.status) | {"reason": "the last start was refused: x", "refused": 2}
    after = RunSnapshot(json.dumps(status), before.checkpoints)
    action, why = decide(before, after, 1, JobHistory("7"), LIMITS, 0)
    assert action == "end" and "refused with exit code 2" in why


def job_runs(history: JobHistory, code: int, after: RunSnapshot, count: int) -> list[str]:
    return [decide(EMPTY, after, code, history, LIMITS, 0)[0] for _ in range(count)]


def test_failed_job_runs_and_job_runs_without_progress_are_limited() -> None:
    history = JobHistory("7")
    assert job_runs(history, 75, EMPTY, 3) == ["requeue", "requeue", "end"]
    history = JobHistory("7")
    assert job_runs(history, 137, record("running", 0), 3) == ["requeue", "requeue", "end"]
    history = JobHistory("7")
    assert job_runs(history, 1, record("failed", 1, 10), 3) == ["requeue", "requeue", "end"]


def test_a_job_run_stopped_after_a_save_resets_both_counts() -> None:
    history = JobHistory("7", failed=2, without_progress=2)
    assert job_runs(history, 75, record("stopped", 75, 10), 1) == ["requeue"]
    assert history == JobHistory("7")


def test_a_failure_restarts_in_the_same_job_run_up_to_the_limit() -> None:
    limits = RequeueLimits(restarts=1, failed_turns=2, turns_without_progress=3)
    after = record("failed", 1)
    assert [decide(EMPTY, after, 1, JobHistory("7"), limits, done)[0] for done in (0, 1)] == [
        "restart",
        "end",
    ]


def stopped_job_runs(folder: Path, saves: Sequence[Sequence[int]]) -> list[int]:
    """Return the exit codes of `job.py stopped` after an elastic job's runs. saves: saved steps of each run."""
    codes = []
    for steps in saves:
        for step in steps:
            path = folder / "run" / "checkpoints" / f"step-{step:08}" / "manifest.json"
            path.parent.mkdir(parents=True)
            path.touch()
        argv = ["--config=debug.toml", "--run.name=run", f"--run.output_dir={folder}"]
        codes.append(count_stop(75, 0, argv, {"SLURM_JOB_ID": "7"}))
    return codes


def test_an_elastic_job_ends_after_three_runs_without_progress(tmp_path) -> None:
    assert stopped_job_runs(tmp_path, [[], [], []]) == [75, 75, 1]


def test_a_new_checkpoint_of_an_elastic_job_resets_the_count(tmp_path) -> None:
    assert stopped_job_runs(tmp_path, [[10], [], [], [20, 30], [], [], []]) == [75, 75, 75, 75, 75, 75, 1]


def test_counts_belong_to_one_job(tmp_path) -> None:
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
def test_squeues_time_is_parsed(text: str, seconds: int | None) -> None:
    assert time_left_s(text) == seconds


def test_the_earlier_of_two_limits_counts(monkeypatch) -> None:
    config = load_config(["--config=debug.toml", "--resilience.time_limit_s=1000"])
    for left_s, limit_s in ((3600.0, 1000.0), (600.0, 570.0), (60.0, 54.0)):
        monkeypatch.setenv("FORGE_TIME_LIMIT_S", str(job.time_limit_s(left_s)))
        assert hooks.time_limit_s(config) == limit_s
    assert hooks.time_limit_s(load_config(["--config=debug.toml"])) == 54.0
    monkeypatch.delenv("FORGE_TIME_LIMIT_S")
    assert (hooks.time_limit_s(load_config(["--config=debug.toml"])), hooks.time_limit_s(config)) == (
        0.0,
        1000.0,
    )


def test_a_login_node_checks_a_configuration_for_any_number_of_processes(capsys) -> None:
    assert main(["check", "16", "--config", "debug.toml"]) == 2
    assert "must be a multiple of micro_batch_size * dp_replicate" in capsys.readouterr().err
    assert main(["check", "8", "--config", "debug.toml"]) == 0
    assert main(["check", "--config", "debug.toml"]) == 2
    fallback = "--parallel.fallbacks=['train.micro_batch_size=1']"
    assert main(["check", "16", "--config", "debug.toml", fallback]) == 0
    assert "16 processes need this entry of parallel.fallbacks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "code", "ended"),
    [
        ({"state": "finished"}, 75, 0),
        ({"state": "finished"}, 137, 0),
        ({"state": "stopped"}, 143, 75),
        ({"state": "stopped", "final": True}, 75, 0),
        ({"state": "running"}, 137, 137),
    ],
)
def test_the_status_decides_after_a_lost_or_leaving_node(tmp_path, status, code: int, ended: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text(json.dumps(status))
    argv = ["--config=debug.toml", "--run.name=run", f"--run.output_dir={tmp_path}"]
    assert count_stop(code, 0, argv, {"SLURM_JOB_ID": "7"}) == ended
    # A status of an earlier job run says nothing.
    assert count_stop(137, 2**40, argv, {"SLURM_JOB_ID": "7"}) == 137
    # A stop before this job's ranks or agents began, whatever the state that an earlier job has left.
    assert count_stop(75, 2**40, argv, {"SLURM_JOB_ID": "8"}) == 75
    assert count_stop(143, 2**40, argv, {"SLURM_JOB_ID": "9"}) == 75


def test_arguments_for_srun_with_an_open_quote_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(job, "_output_of", lambda *command: "")
    with pytest.raises(UserError, match="SRUN_ARGS = --comment='x in the environment: No closing quotation"):
        job.step(1, 1, [], {"SRUN_ARGS": "--comment='x"})
