"""torchrun restarts workers and forwards signals to them. Fresh interpreters, a real launcher."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.launchers import TORCHRUN, command, start
from tests.support.runs import Run, assert_same_history, wait_for

SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@pytest.mark.parametrize("dead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_k5_torchrun_restarts_after_a_killed_worker_and_finishes(tmp_path, undisturbed, dead: int) -> None:
    assert_same_history(restarted(tmp_path, f"step:7:{dead}"), undisturbed(world=2))


@pytest.mark.slow
def test_h1_torchrun_restarts_after_the_watchdog_and_finishes(tmp_path, undisturbed) -> None:
    run = restarted(tmp_path, "step:7:1:sleep", "--resilience.step_timeout_s=10")
    assert [event["step"] for event in run.events("watchdog")] == [7]
    assert_same_history(run, undisturbed(world=2))


@pytest.mark.slow
def test_r6_torchrun_resumes_a_run_with_resume_none_from_its_own_save(tmp_path) -> None:
    none, whole = "--checkpoint.resume=none", Run(tmp_path / "whole", "--checkpoint.resume=none")
    run = restarted(tmp_path, "step:7:1", none)
    assert len(run.events("fresh")) == 1 and len(run.events("resumed")) == 1
    assert whole(world=2) == 0
    assert_same_history(run, whole)


def restarted(folder: Path, fault: str, *options: str) -> Run:
    """Return a run of two ranks: `fault` in its first start, finished in its second."""
    process = start(
        [
            *TORCHRUN,
            "--max-restarts=2",
            "--nproc-per-node=2",
            *command(f"--run.output_dir={folder}", *options),
        ],
        folder,
        FORGE_FAULT=fault,
    )
    _, output = process.communicate(timeout=240)
    assert process.returncode == 0, output
    run = Run(folder)
    assert len(run.events("started")) == 2
    return run


@pytest.mark.slow  # tests/faults/test_preemption.py sends signals directly to the ranks
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_p1_a_signal_to_the_launcher_stops_all_ranks_after_one_checkpoint(tmp_path, name: str) -> None:
    run = Run(tmp_path)
    endless = ["--train.steps=100000", "--checkpoint.interval=0"]
    process = start(
        [*TORCHRUN, SIGNALS, "--nproc-per-node=2", *command(f"--run.output_dir={tmp_path}", *endless)],
        tmp_path,
    )
    wait_for(lambda: run.stepping)
    process.send_signal(signal.Signals[name])
    _, output = process.communicate(timeout=240)
    assert process.returncode != 0
    status = run.status()
    assert status["state"] == "stopped" and status["exit_code"] == 75 and status["reason"] == name, output
    step = status["step"]
    assert run.checkpoints() == [f"step-{step:08d}"]
    assert run.metrics()[-1]["step"] == step

    whole = Run(tmp_path / "whole")
    few = [f"--train.steps={step + 3}", "--checkpoint.interval=0"]
    assert run(*few, world=2) == 0 and whole(*few, world=2) == 0
    assert_same_history(run, whole)
