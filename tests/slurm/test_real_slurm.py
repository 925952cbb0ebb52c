"""train.sbatch under a real Slurm: two nodes, which are both this machine, and every way in which Slurm ends a job."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.support import slurm as slurms
from tests.support.runs import wait_for
from tests.support.slurm import NODES, Job, Slurm

pytestmark = pytest.mark.skipif(bool(slurms.MISSING), reason=f"not installed: {', '.join(slurms.MISSING)}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
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
    try:
        wait_for(condition)
    except AssertionError:
        raise AssertionError(job.log()) from None


def assert_finished_in_turn(job: Job, turn: int) -> None:
    wait_until(lambda: f"turn {turn}," in job.log(), job)
    wait_until(job.ended, job)
    assert job.state() == "finished", job.log()
    assert "Traceback" not in job.log()
    steps = [line["step"] for line in job.run.metrics()]
    assert steps == list(range(1, steps[-1] + 1))


@pytest.mark.slow
def test_a_signal_stops_both_nodes_quietly_and_the_next_turn_finishes(submit) -> None:
    job = submit()
    wait_until(lambda: job.run.stepping, job)
    job.signal()
    wait_until(lambda: job.state() == "stopped", job)
    job.finish_soon()
    assert_finished_in_turn(job, 2)
    assert job.log().count("requeueing") == 1
    stopped = re.findall(r"(?m)^(?!\d\d:|train\.sbatch:|  ).*$", job.log())
    print(stopped)


@pytest.mark.slow
def test_a_preemption_without_grace_loses_no_step(slurm, submit) -> None:
    """Slurm sends SIGTERM to everything in the job, several times, and requeues the job by itself."""
    job = submit()
    wait_until(lambda: job.run.stepping, job)
    urgent = slurm(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=true"
    )
    wait_until(lambda: job.state() == "stopped", job)
    job.finish_soon()
    assert_finished_in_turn(job, 2)
    wait_for(lambda: slurm("squeue", "-h", "-j", urgent) == "")
    [stopped] = job.run.events("stopped")
    assert [event["step"] for event in job.run.events("resumed")] == [stopped["step"]]


@pytest.mark.slow
def test_a_signal_during_imports_is_a_requeue_that_loses_nothing(submit) -> None:
    job = submit()
    wait_until(lambda: len(job.tasks()) >= 2, job)
    job.signal()
    wait_until(lambda: "requeueing" in job.log(), job)
    assert "stopped before the first step; nothing was lost" in job.log()
    assert not job.run.events("started")
    job.finish_soon()
    assert_finished_in_turn(job, 2)


@pytest.mark.slow
def test_a_node_that_dies_ends_the_turn_and_not_the_run(slurm, submit) -> None:
    job = submit("--checkpoint.interval=2")
    wait_until(lambda: "saved step" in job.log(), job)
    slurm.kill_node(NODES[1])
    wait_until(lambda: job.state() == "failed", job)
    job.finish_soon()
    slurm.start_node(NODES[1])
    assert_finished_in_turn(job, 2)
    assert job.run.events("resumed")


@pytest.mark.slow
def test_a_cancelled_job_saves_and_is_not_requeued(slurm, submit) -> None:
    job = submit()
    wait_until(lambda: job.run.stepping, job)
    job.cancel()
    wait_until(job.ended, job)
    assert job.state() == "stopped" and job.run.checkpoints()
    assert "requeueing" not in job.log()
