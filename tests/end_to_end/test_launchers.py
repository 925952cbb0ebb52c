"""The user's commands: plain python, torchrun, an srun step. Fresh interpreters, real signals."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.launchers import TORCHRUN, command, start
from tests.support.runs import Run, reserve_port

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_torchrun_has_the_history_of_forked_ranks(tmp_path) -> None:
    forked = Run(tmp_path / "forked")
    assert forked(world=2) == 0
    process = start([*TORCHRUN, "--nproc-per-node=2", *command(f"--run.output_dir={tmp_path}")], tmp_path)
    _, output = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert Run(tmp_path).metrics() == forked.metrics()


@pytest.mark.slow  # tests/end_to_end/test_bad_input.py covers the report of two ranks; this test adds torchrun
def test_a_wrong_command_line_is_reported_once_and_before_any_training(tmp_path) -> None:
    process = start([*TORCHRUN, "--nproc-per-node=2", *command("--train.stepz=3")], tmp_path)
    _, output = process.communicate(timeout=240)
    assert process.returncode == 1
    assert output.count("train.stepz") == 1 and "train.steps" in output
    assert not (tmp_path / "runs").exists()


def test_plain_python_runs_from_any_folder(tmp_path) -> None:
    process = start([sys.executable, *command("--train.steps=2")], tmp_path)
    _, output = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert json.loads((tmp_path / "runs" / "run" / "status.json").read_text())["state"] == "finished"


def test_the_tasks_of_an_srun_step_find_each_other(tmp_path) -> None:
    port, meeting = reserve_port()
    tasks = [
        start(
            [sys.executable, *command(f"--run.output_dir={tmp_path}", "--train.steps=2")],
            tmp_path,
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_STEP_NUM_TASKS="2",
            SLURM_STEP_NODELIST="localhost",
            MASTER_PORT=meeting["MASTER_PORT"],
        )
        for rank in range(2)
    ]
    for task in tasks:
        _, output = task.communicate(timeout=240)
        assert task.returncode == 0, output
    port.close()
    assert Run(tmp_path).events()[0]["world_size"] == 2


@pytest.mark.parametrize("flag", ["--help", "--print-config"])
def test_help_and_print_config_go_to_stdout_and_exit_0(tmp_path, flag: str) -> None:
    process = start([sys.executable, *command(flag)], tmp_path)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert "global_batch_size" in out


def test_plan_prints_to_stdout_and_starts_nothing(tmp_path) -> None:
    process = start([sys.executable, *command("--plan", "--hardware=h100")], tmp_path)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert "fits" in out and not any(tmp_path.iterdir())
