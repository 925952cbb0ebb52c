"""scripts/slurm/train.sbatch from submission to requeue, with stand-ins for sbatch, srun and scontrol in bin/."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import BASE, reserve_port, wait_for

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "slurm" / "train.sbatch"
STANDINS = Path(__file__).parent / "bin"
# Nothing here takes so long; it only keeps a job that hangs from hanging the tests.
LONG_S = 240


class Cluster:
    """A folder with a run directory and the stand-ins' notes; submits jobs and signals their steps."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.run = folder / "runs" / "run"
        self.port, self.meeting = reserve_port()
        path = os.pathsep.join([str(STANDINS), str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = os.environ | {
            "PATH": path,
            "STANDIN": str(folder),
            "FORGE_HOME": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
        }

    def submit(self, *options: str, slurm: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
        command = ["sbatch", *slurm, str(SCRIPT), *BASE, f"--run.output_dir={self.folder}/runs", *options]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment | environment)

    def status(self) -> dict:
        return json.loads((self.run / "status.json").read_text())

    def requeues(self) -> int:
        notes = self.folder / "scontrol.log"
        lines = notes.read_text().splitlines() if notes.exists() else []
        return sum(line == "requeue 4242" for line in lines)

    def log(self) -> str:
        return (self.folder / "job.log").read_text()

    def signal_step(self, number: int) -> None:
        """As Slurm does it: every process of the step gets the signal, the launchers and the workers."""
        for pid in [int(pid) for pid in (self.folder / "step").read_text().split()]:
            for process in [pid, *_descendants(pid)]:
                # A launcher passes it on, and its worker may be gone by now.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.port.close()


def test_p6_a_run_that_slurm_stops_is_requeued_once_and_finishes_in_its_next_turn(cluster) -> None:
    """Two nodes, SIGTERM in mid-run as `--signal` sends it; the second turn ends at the last step."""
    steps = 100
    job = cluster.submit(
        # The first turn has no end but the signal, however late that comes.
        "--train.steps=1000000",
        "--checkpoint.interval=0",
        slurm=("--nodes=2",),
        GRACE_S="200",
        STANDIN_NEXT_TURNS=f"--train.steps={steps}",
        MASTER_PORT=cluster.meeting["MASTER_PORT"],
    )
    metrics = cluster.run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 3)
    cluster.signal_step(signal.SIGTERM)
    assert job.wait(LONG_S) == 0, cluster.log()
    assert cluster.requeues() == 1
    assert cluster.status()["state"] == "finished"
    events = [json.loads(line) for line in (cluster.run / "events.jsonl").read_text().splitlines()]
    [stopped] = [event for event in events if event["event"] == "stopped"]
    assert stopped["step"] > 0 and stopped["exit_code"] == 75
    told = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert told == list(range(1, max(steps, stopped["step"]) + 1))
    assert [event["world_size"] for event in events if event["event"] == "started"] == [2, 2]


@pytest.mark.slow
def test_p6_a_worker_that_dies_is_not_requeued(cluster) -> None:
    job = cluster.submit(FORGE_FAULT="step:3:0")
    assert job.wait(LONG_S) != 0
    assert cluster.requeues() == 0
    assert "not requeued" in cluster.log()


# A step that only leaves a status.json behind: what the script decides, without the seconds that a launch takes.
def leave(state: str, code: int) -> str:
    status = json.dumps({"state": state, "step": 5, "exit_code": code, "time": "now"})
    return f"mkdir -p runs/run && echo '{status}' > runs/run/status.json; exit {code}"


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("failed", 1), ("failed", 0), ("running", 137)])
def test_p6_nothing_but_stopped_is_requeued_whatever_the_exit_code(cluster, state: str, code: int) -> None:
    assert cluster.submit(STANDIN_STEP=leave(state, code)).wait(LONG_S) == code
    assert cluster.requeues() == 0


@pytest.mark.parametrize("code", [0, 1])
def test_p6_stopped_is_requeued_whatever_the_exit_code(cluster, code: int) -> None:
    again = leave("finished", 0)
    step = f"if (( SLURM_RESTART_COUNT )); then {again}; else {leave('stopped', code)}; fi"
    assert cluster.submit(STANDIN_STEP=step).wait(LONG_S) == 0
    assert cluster.requeues() == 1


def test_p6_the_status_of_an_earlier_turn_does_not_count(cluster) -> None:
    """A job that dies before it has written a status would otherwise be requeued for ever."""
    cluster.run.mkdir(parents=True)
    (cluster.run / "status.json").write_text('{"state": "stopped", "step": 5}')
    assert cluster.submit(STANDIN_STEP="exit 1").wait(LONG_S) == 1
    assert cluster.requeues() == 0


def test_a_mistake_in_the_configuration_is_told_before_any_node_starts(cluster) -> None:
    assert cluster.submit("--train.stepps=3").wait(LONG_S) == 2
    assert "train.stepps" in cluster.log() and "Traceback" not in cluster.log()
    assert not (cluster.folder / "srun.log").exists() and cluster.requeues() == 0


def test_arguments_reach_train_py_unchanged(cluster) -> None:
    step = leave("finished", 0)
    assert (
        cluster.submit("--evaluate.sample_prompt=two  words, 'quoted'", STANDIN_STEP=step).wait(LONG_S) == 0
    )
    assert "--evaluate.sample_prompt=two  words, 'quoted'" in (cluster.folder / "srun.log").read_text()


@pytest.mark.parametrize("has", [True, False])
def test_flags_that_this_torchrun_lacks_are_left_out(cluster, has: bool) -> None:
    known = "--signals-to-handle --shutdown-timeout" if has else ""
    folder = cluster.folder / "old"
    folder.mkdir()
    (folder / "torchrun").write_text(f"#!/bin/sh\necho usage: torchrun {known}\n")
    (folder / "torchrun").chmod(0o755)
    path = os.pathsep.join([str(folder), cluster.environment["PATH"]])
    assert cluster.submit(STANDIN_STEP=leave("finished", 0), PATH=path).wait(LONG_S) == 0
    launched = (cluster.folder / "srun.log").read_text()
    assert ("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" in launched) is has
    assert ("--shutdown-timeout=280" in launched) is has


def test_the_signal_goes_to_the_steps_and_not_to_the_shell() -> None:
    directives = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "--signal=SIGTERM@300" in directives
    assert "--requeue" in directives and "--open-mode=append" in directives


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    assert subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True).stdout == ""


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of a thread that has ended
            for child in task.read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found
