"""Do the work of one job run for train.sbatch: check the configuration, start the workers, and requeue the job if useful.

A job run is one execution of a Slurm job. A requeue begins the next job run. elastic.sbatch calls this program after a
stop, to decide about a requeue.

On a login node, this command only checks a configuration for 64 processes:

    python scripts/slurm/job.py check 64 --config 7b.toml [--section.key=value ...]
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

HOME = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HOME))

from forge.config import (  # noqa: E402
    Config,
    choose_layout,
    load_command,
    load_config,
    parse_command_line,
)
from forge.runtime.errors import BAD_CONFIG, FAILED, FINISHED, NO_CHECKPOINT, STOPPED, UserError  # noqa: E402

JobAction = Literal["end", "restart", "requeue"]
# Warn about a job run with fewer seconds: it needs time for a start-up and for Slurm's notice of 300 s.
SHORT_S = 600
# Seconds between the end of the srun step and the end of the job.
MARGIN_S = 30
# Exit codes of workers ended by a signal: by SIGKILL, or by a stop signal before its handler was installed.
KILLED = 128 + signal.SIGKILL
BEFORE_HANDLERS = {128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
# Variables hidden from srun, because they would override its options: one task per worker, all GPUs visible to each.
NOT_FOR_THE_STEP = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_CPUS_PER_TASK"),
    *("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_BIND"),
)


@dataclass(frozen=True)
class RunSnapshot:
    """The state of a run directory.

    status: text of status.json. checkpoints: (folder name, time of the manifest in ns) of each complete checkpoint.
    """

    status: str
    checkpoints: frozenset[tuple[str, int]]

    @staticmethod
    def read(run: Path) -> RunSnapshot:
        try:
            status = (run / "status.json").read_text()
        except OSError:
            status = ""
        manifests = (run / "checkpoints").glob("step-*/manifest.json")
        return RunSnapshot(
            status, frozenset((path.parent.name, path.stat().st_mtime_ns) for path in manifests)
        )


@dataclass
class JobHistory:
    """Counts of the latest consecutive job runs of a job.

    failed: job runs with a failure. without_progress: job runs stopped or killed without a new checkpoint. newest: for an
    elastic job, the newest checkpoint at the end of the previous job run.
    """

    job: str
    failed: int = 0
    without_progress: int = 0
    newest: str = ""

    @staticmethod
    def read(path: Path, job: str) -> JobHistory:
        try:
            history = JobHistory(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return JobHistory(job)
        return history if history.job == job else JobHistory(job)


@dataclass(frozen=True)
class RequeueLimits:
    """Limits for one job.

    restarts: number of restarts within a job run. failed_turns: number of consecutive job runs with a failure.
    turns_without_progress: number of consecutive job runs without a new checkpoint.
    """

    restarts: int
    failed_turns: int
    turns_without_progress: int


def decide(
    before: RunSnapshot,
    after: RunSnapshot,
    code: int,
    history: JobHistory,
    limits: RequeueLimits,
    restarts: int,
) -> tuple[JobAction, str]:
    """Return the action after the end of the srun step, and the reason for it. Count the job run in `history`.

    before, after: the run directory at the start and at the end of the job run. code: exit code of the step. restarts: number
    of restarts within this job run so far.
    """
    status = json.loads(after.status) if after.status and after.status != before.status else {}
    state = status.get("state", "not begun")
    saved = bool(after.checkpoints - before.checkpoints)
    if code in (BAD_CONFIG, NO_CHECKPOINT):
        # Do not read the status: another run may use the directory.
        return "end", f"ended with exit code {code}: fix the reason above first"
    if "refused" in status:  # torchrun ends with 1
        return "end", f"was refused with exit code {status['refused']}: fix the reason above first"
    if state == "finished":
        return "end", "is finished"
    if status.get("final"):
        return "end", "was stopped by a hook"
    # srun returns the greatest exit code of its workers. With 75, a worker was stopped, perhaps before it wrote a status.
    if state == "stopped" or code == STOPPED or (not status and code in BEFORE_HANDLERS):
        history.failed = 0
        history.without_progress = 0 if saved else history.without_progress + 1
        if history.without_progress < limits.turns_without_progress:
            when = "after a save" if saved else "before it had saved anything new"
            return "requeue", f"was stopped {when}"
        turns = f"{history.without_progress} consecutive job runs have"
        return "end", f"was stopped, and {turns} saved nothing new: ask for more --time"
    if status.get("exit_code") in (BAD_CONFIG, NO_CHECKPOINT) or (code == FINISHED and not status):
        return "end", f"ended with exit code {code} in state {state}"
    if restarts < limits.restarts:
        return "restart", f"ended with exit code {code} in state {state}"
    history.failed += 1
    if not saved:
        # The usual cause of KILLED is a lost node, because srun ends before Slurm notices the loss.
        history.without_progress += code == KILLED
        if code != KILLED or history.without_progress >= limits.turns_without_progress:
            return (
                "end",
                f"ended with exit code {code} in state {state}, and this job run saved no checkpoint",
            )
        return "requeue", "ended because a worker was killed, and this job run saved no checkpoint"
    if history.failed > limits.failed_turns:
        return (
            "end",
            f"ended with exit code {code} in state {state}, and {history.failed} consecutive job runs have failed",
        )
    history.without_progress = 0
    return (
        "requeue",
        f"ended with exit code {code} in state {state}, after this job run had saved a checkpoint",
    )


def train(argv: list[str], environment: Mapping[str, str] = os.environ) -> int:
    """Make one job run with train.py's arguments `argv`, and requeue the job if useful. Return the job's exit code."""
    job, nodes = environment.get("SLURM_JOB_ID", "0"), _number(environment, "SLURM_JOB_NUM_NODES", 1)
    workers = workers_per_node(environment)
    limits = _limits(environment)
    config = check(argv, nodes * workers)
    run = (Path(config.run.output_dir) / config.run.name).absolute()
    left = time_left_s(_output_of("squeue", "-h", "-j", job, "-o", "%L"))
    end = time.monotonic() + left if left is not None else None
    ends = "no time limit" if left is None else f"{left} s left"
    turn = _number(environment, "SLURM_RESTART_COUNT", 0) + 1
    now, each = time.strftime("%Y-%m-%d %H:%M:%S"), f"{workers} worker{'s' if workers > 1 else ''}"
    _print(
        f"{now}: job {job}, job run {turn}, {ends}: {nodes} x {each} on {environment.get('SLURM_JOB_NODELIST')}, {run}"
    )
    if left is not None and left < SHORT_S:
        _print(
            f"warning: {left} s may be too short for a start-up and for Slurm's notice (300 s unless set by --signal): "
            "ask for more --time, or for a shorter notice, e.g. --signal=SIGTERM@60"
        )

    history_path = run / "requeues.json"
    history, before, restarts = JobHistory.read(history_path, job), RunSnapshot.read(run), 0
    while True:
        limit_s = None if end is None else time_limit_s(end - time.monotonic())
        code = subprocess.run(
            step(nodes, workers, argv, environment, limit_s), env=step_environment(workers, environment)
        ).returncode
        code = 128 - code if code < 0 else code
        job_state = _output_of("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()
        if job_state not in ("", "RUNNING"):
            # A node died, or the job was cancelled or preempted: Slurm decides about the requeue.
            _print(
                f"Slurm has ended this run of job {job} ({job_state}), and decides whether to requeue the job"
            )
            return code
        action, why = decide(before, RunSnapshot.read(run), code, history, limits, restarts)
        if action != "restart":
            break
        restarts += 1
        _print(f"{run} {why}; restart {restarts} of {limits.restarts}")
    if action == "requeue" and not _write(history_path, history):
        action, why = "end", f"{why}, and {history_path} cannot be written"
    if action == "end":
        _print(f"{run} {why}; not requeued")
        return code
    _print(f"{run} {why}; requeueing job {job}")
    if subprocess.run(["scontrol", "requeue", job]).returncode:
        _print(f"job {job} cannot be requeued; submit the same command again")
        return code or STOPPED
    return FINISHED


def count_stop(code: int, began: int, argv: list[str], environment: Mapping[str, str] = os.environ) -> int:
    """Count a stopped job run of elastic.sbatch. code: the greatest exit code of its agents. began: its start, Unix time.

    Return STOPPED (75) if the job should be requeued, FINISHED (0) if the run is finished or a hook stopped it, `code` if
    a signal killed a working agent and the run was not stopped, else FAILED (1).
    """
    config, job = load_config(argv), environment.get("SLURM_JOB_ID", "0")
    run = (Path(config.run.output_dir) / config.run.name).absolute()
    history, after = JobHistory.read(run / "requeues.json", job), RunSnapshot.read(run)
    path = run / "status.json"
    written = path.is_file() and path.stat().st_mtime >= began  # otherwise an earlier job run wrote it
    status = json.loads(after.status or "{}") if written else {}
    if status.get("state") == "finished" or status.get("final"):
        return FINISHED
    early = not written and code in BEFORE_HANDLERS  # a signal ended the agents before they could handle it
    if code != STOPPED and not early and status.get("state") != "stopped":
        return code
    after = after if written else RunSnapshot("", after.checkpoints)
    names = {name for name, _ in after.checkpoints}
    before = RunSnapshot("", frozenset(one for one in after.checkpoints if one[0] <= history.newest))
    history.newest = max(names, default="")
    action, why = decide(before, after, STOPPED, history, _limits(environment), 0)
    if action == "requeue" and not _write(run / "requeues.json", history):
        action, why = "end", f"{why}, and {run / 'requeues.json'} cannot be written"
    _print(f"{run} {why}; {'requeueing' if action == 'requeue' else 'not requeued:'} job {job}")
    return STOPPED if action == "requeue" else FAILED


def check(argv: list[str], world: int) -> Config:
    """Return the configuration for train.py's arguments `argv`.

    If the configuration does not fit `world` processes, return that of the first entry of `parallel.fallbacks` that does.
    Raises UserError if the configuration is invalid or none fits.
    """
    command = parse_command_line(argv)
    config, _, fallback = choose_layout(command, load_command(command), world)
    if fallback:
        _print(f"{world} processes need this entry of parallel.fallbacks: {fallback}")
    return config


def workers_per_node(environment: Mapping[str, str]) -> int:
    """Return the number of workers per node: PROCESSES_PER_NODE if set, else the number of GPUs, 1 without a GPU."""
    for name in ("PROCESSES_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if number := _number(environment, name, 0):
            return number
    return _output_of("nvidia-smi", "-L").count("GPU ") or 1


def step(
    nodes: int, workers: int, argv: list[str], environment: Mapping[str, str], limit_s: int | None = None
) -> list[str]:
    """Return the srun command of a step with one task per worker. limit_s: from `time_limit_s`; None: no limit."""
    # A worker's end must not end the others at once, because rank 0 may be writing its crash report. `--wait` ends the
    # remaining workers, but only after SlurmdTimeout, so that Slurm first detects a lost node and requeues the job.
    timeout = re.search(r"SlurmdTimeout\s*=\s*(\d+)", _output_of("scontrol", "show", "config"))
    wait = max(120, int(timeout[1]) + 60 if timeout else 360)
    tasks = [f"--nodes={nodes}", f"--ntasks={nodes * workers}", f"--ntasks-per-node={workers}"]
    # --overcommit: the job has one task per node, and perhaps fewer CPUs than workers.
    options = ["--overcommit", "--cpu-bind=none", "--kill-on-bad-exit=0", f"--wait={wait}"]
    given = environment.get("SRUN_ARGS", "")
    try:
        more = shlex.split(given)
    except ValueError as error:  # e.g. an open quote
        raise UserError(f"SRUN_ARGS = {given} in the environment: {error}") from None
    python = environment.get("PYTHON", sys.executable)
    # In the command, because srun may not export the environment (SRUN_ARGS, SLURM_EXPORT_ENV).
    limit = [] if limit_s is None else ["env", f"FORGE_TIME_LIMIT_S={limit_s}"]
    return ["srun", *tasks, *options, *more, *limit, python, str(HOME / "train.py"), *argv]


def step_environment(workers: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for srun and the workers, without the variables in NOT_FOR_THE_STEP."""
    kept = {name: value for name, value in environment.items() if name not in NOT_FOR_THE_STEP}
    if workers > 1:
        # By default each worker would start as many threads as the node has cores.
        kept.setdefault("OMP_NUM_THREADS", "1")
    return kept


def time_limit_s(left_s: float) -> int:
    """Return the seconds after which train.py must have ended. left_s: seconds left for the job."""
    return max(1, round(left_s - min(MARGIN_S, left_s / 10)))


def time_left_s(text: str) -> int | None:
    """Return the seconds in squeue's %L, `[days-][[hours:]minutes:]seconds`; None without a time limit."""
    match = re.fullmatch(r"(?:(\d+)-)?((?:\d+:){0,2}\d+)", text.strip())
    if match is None:
        return None
    seconds = 0
    for part in match[2].split(":"):
        seconds = 60 * seconds + int(part)
    return int(match[1] or 0) * 24 * 3600 + seconds


def _limits(environment: Mapping[str, str]) -> RequeueLimits:
    return RequeueLimits(
        restarts=_number(environment, "MAX_RESTARTS", 0),
        failed_turns=_number(environment, "MAX_FAILED_TURNS", 10),
        turns_without_progress=_number(environment, "MAX_TURNS_WITHOUT_PROGRESS", 3),
    )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal():
        raise UserError(f"{name} = {text} in the environment: must be a whole number")
    return int(text)


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout
    except OSError:
        return ""


def _write(path: Path, history: JobHistory) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(history)) + "\n")
    except OSError:
        return False
    return True


def _print(text: str) -> None:
    print(f"train.sbatch: {text}", flush=True)


def main(argv: list[str]) -> int:
    """Run `train ARGUMENTS`, `stopped CODE BEGAN ARGUMENTS` or `check WORLD ARGUMENTS`, and return the exit code."""
    try:
        if argv[:1] in (["-h"], ["--help"]):
            print(__doc__)
            return FINISHED
        if argv[:1] == ["train"]:
            return train(argv[1:])
        if argv[:1] == ["stopped"]:
            return count_stop(int(argv[1]), int(argv[2]), argv[3:])
        if argv[:1] == ["check"] and argv[1:2] and argv[1].isdecimal() and int(argv[1]):
            config = check(argv[2:], int(argv[1]))
            _print(f"{config.run.name} fits {argv[1]} processes")
            return FINISHED
        raise UserError(f"usage: {sys.argv[0]} check PROCESSES --config FILE [--section.key=value ...]")
    except UserError as error:
        print(f"train.sbatch: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
