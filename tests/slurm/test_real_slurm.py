"""train.sbatch under a real Slurm, with two nodes on this machine, and all of Slurm's ways to end a job."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forge.config.keys import read_toml
from forge.runtime.errors import UserError
from forge.tools.sweep.local import run_sweep
from forge.tools.sweep.slurm import job_array
from forge.tools.sweep.spec import Sweep, first_trials
from tests.support import slurm as slurms
from tests.support.runs import BASE, Run, wait_for
from tests.support.slurm import NODES, SCRIPT, Job, Slurm

ELASTIC = SCRIPT.with_name("elastic.sbatch")
pytestmark = pytest.mark.skipif(bool(slurms.MISSING), reason=f"not installed: {', '.join(slurms.MISSING)}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
    except AssertionError:
        slurm.stop()
        # Another version may need another configuration. Its errors are not a defect of forge.
        pytest.skip(f"this Slurm does not start as an ordinary user: {slurm.errors()}")
    try:
        yield slurm
    finally:
        slurm.stop()


@pytest.fixture
def submit(slurm, tmp_path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def submit(*options: str, **environment: str) -> Job:
        jobs.append(Job(slurm, tmp_path, *options, **environment))
        return jobs[-1]

    yield submit
    for job in jobs:
        job.cancel()
        wait_for(job.ended)


def wait_until(condition: Callable[[], object], job: Job) -> None:
    """Wait for the condition. Fail with the job's log if the job ends first, or after a long time."""
    asked = time.monotonic()

    def holds() -> bool:
        nonlocal asked
        if time.monotonic() - asked > 2:
            asked = time.monotonic()
            assert not job.ended() or condition(), job.log()
        return bool(condition())

    wait_for(holds, 150)


def assert_finished_in_job_run(job: Job, number: int) -> None:
    wait_until(lambda: f"job run {number}," in job.log(), job)
    wait_until(job.ended, job)
    assert job.state() == "finished", job.log()
    steps = [line["step"] for line in job.run.metrics()]
    assert steps == list(range(1, steps[-1] + 1))


# A stub interpreter: each worker prints its environment.
WORKER = """#!/bin/bash
[[ $1 == */train.py ]] || exec "$REAL_PYTHON" "$@"
echo "worker $SLURM_PROCID of $SLURM_STEP_NUM_TASKS, local $SLURM_LOCALID, cards $CUDA_VISIBLE_DEVICES"
"""


@pytest.mark.parametrize(
    "gpus",
    [
        pytest.param("--gpus-per-node=2", marks=pytest.mark.slow),
        "--ntasks-per-node=2 --gpus-per-task=1",
        "--gpus=4 --exclusive",
    ],
)
def test_every_worker_sees_all_gpus_of_its_node_for_any_request(slurm, tmp_path, gpus: str) -> None:
    python, log = tmp_path / "python", tmp_path / "job.log"
    python.write_text(WORKER)
    python.chmod(0o755)
    submit = [
        "sbatch",
        "--wait",
        "--nodes=2",
        *gpus.split(),
        f"--output={log}",
        str(SCRIPT),
        "--config=debug.toml",
    ]
    slurm(*submit, PYTHON=str(python), REAL_PYTHON=sys.executable)
    workers = sorted(line for line in log.read_text().splitlines() if line.startswith("worker"))
    assert workers == [f"worker {rank} of 4, local {rank % 2}, cards 0,1" for rank in range(4)], (
        log.read_text()
    )


def test_a_layout_unfit_for_the_nodes_ends_the_job_before_a_worker_starts(slurm, tmp_path) -> None:
    log = tmp_path / "job.log"
    layout = ["--config=debug.toml", "--parallel.dp_shard=2"]
    slurm("sbatch", "--wait", "--nodes=2", "--gpus-per-node=2", f"--output={log}", str(SCRIPT), *layout)
    [line] = log.read_text().splitlines()
    assert "parallel.dp_shard = 2" in line and "there are 4 processes" in line


def test_tasks_bound_by_srun_to_a_gpu_each_detect_it(slurm) -> None:
    seen = slurm("srun", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=1", "env")
    assert (
        re.findall(r"SLURMD_TRES_BIND=.*gpu:per_task", seen)
        and seen.count("SLURM_STEP_TASKS_PER_NODE=2(x2)") == 4
    )
    assert seen.count("CUDA_VISIBLE_DEVICES=0\n") == seen.count("CUDA_VISIBLE_DEVICES=1\n") == 2


@pytest.mark.slow
def test_a_signal_stops_both_nodes_quietly_and_the_next_job_run_finishes(submit) -> None:
    job = submit()
    wait_until(lambda: job.run.stepping, job)
    job.signal()
    wait_until(lambda: job.state() == "stopped", job)
    job.finish_soon()
    assert_finished_in_job_run(job, 2)
    assert job.log().count("requeueing") == 1
    assert "Traceback" not in job.log()
    # Slurm's own messages about the job, its step and each task's exit code, once per job run.
    noise = re.findall(r"(?m)^(?!\d\d:|train\.sbatch:|forge: |  ).+$", job.log())
    assert len(noise) <= 8, noise


@pytest.mark.slow
def test_a_preemption_without_grace_loses_no_step(slurm, submit) -> None:
    """Slurm sends SIGTERM to all processes of the job, several times, and requeues the job itself."""
    job = submit()
    wait_until(lambda: job.run.stepping, job)
    urgent = slurm(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--exclusive",
        "--nodes=2",
        "--output=/dev/null",
        "--wrap=true",
    )
    wait_until(lambda: job.state() == "stopped", job)
    job.finish_soon()
    assert_finished_in_job_run(job, 2)
    assert "Traceback" not in job.log()
    wait_for(lambda: slurm("squeue", "-h", "-j", urgent) == "")
    [stopped] = job.run.events("stopped")
    assert [event["step"] for event in job.run.events("resumed")] == [stopped["step"]]


@pytest.mark.slow
@pytest.mark.parametrize("python_is_up", [True, False])
def test_a_signal_before_the_first_step_requeues_and_loses_nothing(submit, python_is_up: bool) -> None:
    job = submit()
    wait_until(job.handles_signals if python_is_up else lambda: len(job.tasks()) == 2, job)
    job.signal()
    wait_until(lambda: "requeueing" in job.log(), job)
    assert ("stopped before the first step; nothing was lost" in job.log()) is python_is_up
    assert not job.run.events("started")
    job.finish_soon()
    assert_finished_in_job_run(job, 2)


@pytest.mark.slow
def test_a_dead_node_ends_the_job_run_and_not_the_training_run(slurm, submit) -> None:
    """Slurm notices later and requeues the job. Meanwhile the workers on the other node have failed."""
    job = submit("--checkpoint.interval=2")
    wait_until(lambda: "saved step" in job.log(), job)
    slurm.kill_node(NODES[1])
    wait_until(lambda: job.state() == "failed", job)
    job.finish_soon()
    wait_until(lambda: slurm.node_state(NODES[1]).startswith("down"), job)
    slurm.start_node(NODES[1])
    assert_finished_in_job_run(job, 2)
    assert job.run.events("resumed")


@pytest.mark.slow
def test_a_cancelled_job_saves_and_is_not_requeued(slurm, submit) -> None:
    job = submit()
    wait_until(lambda: job.run.stepping, job)
    job.cancel()
    wait_until(job.ended, job)
    assert job.state() == "stopped" and job.run.checkpoints()
    assert "requeueing" not in job.log()


@pytest.mark.slow
def test_a_sweep_as_a_job_array_finishes_despite_a_stopped_task(slurm, tmp_path) -> None:
    """The stopped task saves, is requeued and continues; the others run once. Then nothing is pending."""
    pairs = (option.removeprefix("--").split("=", 1) for option in BASE)
    overrides = {key: _value(text) for key, text in pairs if key not in ("config", "run.name", "train.steps")}
    keys = {"train.steps": [5, 300], "optimizer.lr": [0.001, 0.003]}
    tree = {"config": "debug", "output_dir": str(tmp_path), "overrides": overrides, "keys": keys}
    sweep = Sweep.model_validate(tree | {"workers": 4, "threads": 1})
    sweep.folder.mkdir()
    script = tmp_path / "array.sbatch"
    script.write_text(job_array(sweep))
    number = slurm("sbatch", "--parsable", str(script))
    (long,) = (t for t in first_trials(sweep) if t.values == {"train.steps": 300, "optimizer.lr": 0.003})
    run = Run(tmp_path)
    run.path = sweep.folder / long.run_name(0)
    wait_for(lambda: run.stepping, 150)
    slurm("scancel", "--batch", "--signal=TERM", f"{number}_{long.number}")
    wait_for(lambda: run.events("stopped"), 60)
    wait_for(lambda: slurm("squeue", "-h", "-j", number) == "", 300)
    assert run.events("resumed")[0]["step"] == run.events("stopped")[0]["step"]
    results = run_sweep(sweep, lambda found: None, train=["false"])
    assert [result.states for result in results] == [["finished"]] * 4
    with pytest.raises(UserError, match="all runs of the sweep have ended"):
        job_array(sweep)


def _value(text: str) -> Any:
    try:
        return read_toml(f"value = {text}")["value"]
    except ValueError:
        return text


@pytest.mark.slow
def test_an_elastic_job_outlives_one_of_its_nodes(slurm, tmp_path) -> None:
    run, log = Run(tmp_path), tmp_path / "job.log"
    arguments = [*BASE, f"--run.output_dir={tmp_path}", "--train.steps=400", "--checkpoint.interval=10"]
    submit = [
        "sbatch",
        "--parsable",
        "--nodes=2",
        "--exclusive",
        "--time=20",
        f"--output={log}",
        str(ELASTIC),
    ]
    number = slurm(*submit, *arguments, PYTHON=sys.executable, PROCESSES_PER_NODE="1", LOST_AFTER="8").strip()

    def ended() -> bool:
        return slurm("squeue", "-h", "-j", number) == ""

    try:
        wait_for(lambda: run.stepping or ended(), 150)
        assert [event["world_size"] for event in run.events("started")] == [2], log.read_text()
        of_second_node = slurm.processes(f"SLURM_JOB_ID={number}", "SLURM_PROCID=1")
        agents = [pid for pid in of_second_node if b"elastic.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        for pid in agents:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: run.events("recovered") or ended(), 150)
        wait_for(ended, 150)
    finally:
        slurm("scancel", number)
    assert [event["world_size"] for event in run.events("started")] == [2, 1], log.read_text()
    assert run.status()["state"] == "finished"
    assert [line["step"] for line in run.metrics()] == list(range(1, 401))
