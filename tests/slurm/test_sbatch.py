"""scripts/slurm/train.sbatch from submission to requeue, with stubs of Slurm's commands in bin/."""

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
# Far above any test's duration: it only stops a hanging job.
LONG_S = 240


class Cluster:
    """A folder with a run directory and the stubs' logs. Submits jobs and signals their steps."""

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
        """Signal every process of the step, like Slurm."""
        for pid in [int(pid) for pid in (self.folder / "step").read_text().split()]:
            for process in [pid, *_descendants(pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.port.close()


@pytest.mark.slow
def test_p6_a_run_stopped_by_slurm_is_requeued_once_and_finishes_in_the_next_job_run(cluster) -> None:
    """Two nodes, SIGTERM in mid-run like `--signal`; the second job run ends at the last step."""
    steps = 100
    job = cluster.submit(
        # Only the signal ends the first job run, however late it comes.
        "--train.steps=1000000",
        "--checkpoint.interval=0",
        slurm=("--nodes=2",),
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
    steps_reported = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps_reported == list(range(1, max(steps, stopped["step"]) + 1))
    assert [event["world_size"] for event in events if event["event"] == "started"] == [2, 2]


@pytest.mark.slow
def test_p6_a_dying_worker_is_restarted_while_job_runs_save_new_steps(cluster) -> None:
    """Each further job run resumes from step 4 and dies in the same step. The third one ends the job."""
    job = cluster.submit("--checkpoint.mode=sync", FORGE_FAULT="step:5:0")
    assert job.wait(LONG_S) != 0
    assert cluster.requeues() == 3
    assert "this job run saved no checkpoint; not requeued" in cluster.log()


# A step that only writes status.json, to test the script's decisions without the seconds of a launch.
def leave(state: str, code: int) -> str:
    status = json.dumps({"state": state, "step": 5, "exit_code": code})
    return f"mkdir -p runs/run && echo '{status}' > runs/run/status.json; exit {code}"


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("failed", 1), ("running", 139)])
def test_p6_an_end_without_a_new_checkpoint_is_not_requeued(cluster, state: str, code: int) -> None:
    assert cluster.submit(STANDIN_STEP=leave(state, code)).wait(LONG_S) == code
    assert cluster.requeues() == 0


def test_p6_a_job_always_stopped_before_its_first_save_is_not_requeued_forever(cluster) -> None:
    assert cluster.submit(STANDIN_STEP="exit 75").wait(LONG_S) == 75
    assert cluster.requeues() == 2
    assert "3 consecutive job runs have saved nothing new" in cluster.log()


def test_p6_a_node_lost_before_the_first_save_is_requeued_and_counted(cluster) -> None:
    assert cluster.submit(STANDIN_STEP=leave("running", 137)).wait(LONG_S) == 137
    assert cluster.requeues() == 2


def test_p6_a_cancelled_job_is_not_requeued(cluster) -> None:
    assert cluster.submit(STANDIN_STEP=leave("stopped", 75), STANDIN_STATE="COMPLETING").wait(LONG_S) == 75
    assert cluster.requeues() == 0
    assert "Slurm has ended this run" in cluster.log()


def test_p6_the_status_of_an_earlier_job_run_does_not_count(cluster) -> None:
    """Otherwise a job that dies before writing a status would be requeued forever."""
    cluster.run.mkdir(parents=True)
    (cluster.run / "status.json").write_text('{"state": "stopped", "step": 5}')
    assert cluster.submit(STANDIN_STEP="exit 1").wait(LONG_S) == 1
    assert cluster.requeues() == 0


@pytest.mark.parametrize("option", ["--train.stepps=3", "--parallel.dp_shard=4"])
def test_a_mistake_in_the_configuration_or_layout_is_reported_before_any_worker_starts(
    cluster, option: str
) -> None:
    job = cluster.submit(option, slurm=("--nodes=2",), PROCESSES_PER_NODE="4")
    assert job.wait(LONG_S) == 2
    assert option[2:].partition("=")[0] in cluster.log() and "Traceback" not in cluster.log()
    assert len(cluster.log().splitlines()) == 2  # "job run 0" and one sentence
    assert not (cluster.folder / "srun.log").exists() and cluster.requeues() == 0


def test_arguments_reach_train_py_unchanged(cluster) -> None:
    step = leave("finished", 0)
    assert (
        cluster.submit("--evaluate.sample_prompt=two  words, 'quoted'", STANDIN_STEP=step).wait(LONG_S) == 0
    )
    assert "--evaluate.sample_prompt=two  words, 'quoted'" in (cluster.folder / "srun.log").read_text()


def test_sbatch_options_per_task_do_not_reach_the_workers(cluster) -> None:
    """Each worker would see one GPU and select the second one."""
    step = f"env > step.env; {leave('finished', 0)}"
    environment = {"SLURM_GPUS_PER_TASK": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "8"}
    assert cluster.submit(STANDIN_STEP=step, **environment).wait(LONG_S) == 0
    reached = (cluster.folder / "step.env").read_text()
    assert "_PER_TASK=" not in reached and "SLURM_GPUS_ON_NODE=2" in reached
    assert "--ntasks=2 --ntasks-per-node=2" in (cluster.folder / "srun.log").read_text()


def test_a_prologue_and_more_arguments_for_srun(cluster) -> None:
    prologue = cluster.folder / "site.sh"
    prologue.write_text("export NCCL_SOCKET_IFNAME=ib0; unset_here=$NOT_SET_ANYWHERE")
    step = f"echo $NCCL_SOCKET_IFNAME > interface; {leave('finished', 0)}"
    site = {"PROLOGUE": str(prologue), "SRUN_ARGS": "--container-image='my image.sqsh' --wait=5"}
    assert cluster.submit(STANDIN_STEP=step, **site).wait(LONG_S) == 0
    assert (cluster.folder / "interface").read_text() == "ib0\n"
    assert "--wait=360 --container-image=my image.sqsh --wait=5 " in (cluster.folder / "srun.log").read_text()


def test_the_run_ends_before_its_job_and_a_short_time_limit_is_a_warning(cluster) -> None:
    step = f"echo $FORGE_TIME_LIMIT_S > limit; {leave('finished', 0)}"
    assert cluster.submit(STANDIN_STEP=step, STANDIN_TIME_LEFT="5:00").wait(LONG_S) == 0
    assert 200 < int((cluster.folder / "limit").read_text()) <= 270
    assert "warning: 300 s may be too short" in cluster.log()


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
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may have ended
            for child in task.read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found
