#!/usr/bin/env python
"""Run one task of a job array: train a run of a sweep, requeue the task after a stop, and exit with the run's exit code.

    python scripts/slurm/array_task.py RUN COMMAND...

`scripts/sweep.py --slurm` writes this command. RUN is the run directory, COMMAND trains the run. After
MAX_TURNS_WITHOUT_PROGRESS consecutive stops (3 unless set) without a new checkpoint, the task is not requeued.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from forge.runtime.errors import FINISHED, STOPPED, UserError
from scripts.options import Options
from scripts.slurm.job import JobHistory, RequeueLimits, RunSnapshot, _number, _write, decide


def main(argv: list[str]) -> int:
    """Run the task, requeue it after a stop, and return the run's exit code."""
    parser = Options(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="command that trains the run"
    )
    options = parser.parse_args(argv)
    run, command = options.run, options.command
    if not command:
        parser.error("the command of the run is missing")
    if "SLURM_ARRAY_JOB_ID" not in os.environ:
        parser.error(
            "SLURM_ARRAY_JOB_ID is not set: this script runs only in a job array, written by scripts/sweep.py --slurm"
        )
    job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        turns = _number(os.environ, "MAX_TURNS_WITHOUT_PROGRESS", 3)
    except UserError as error:
        parser.error(str(error))
    limits = RequeueLimits(restarts=0, failed_turns=0, turns_without_progress=turns)
    history, before = JobHistory.read(run / "requeues.json", job), RunSnapshot.read(run)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until SIGTERM can be passed on to the child
    process = subprocess.Popen(command, preexec_fn=_unblock)
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    _unblock()
    code = process.wait()
    code = 128 - code if code < 0 else code
    action, why = decide(before, RunSnapshot.read(run), code, history, limits, restarts=0)
    if action == "requeue" and not _write(run / "requeues.json", history):
        action, why = "end", f"{why}, and {run}/requeues.json cannot be written"
    print(
        f"array task {job}: {run} {why}; {'requeueing' if action == 'requeue' else 'not requeued'}",
        flush=True,
    )
    if action == "requeue" and subprocess.run(["scontrol", "requeue", job]).returncode == 0:
        return FINISHED
    return code or (STOPPED if action == "requeue" else FINISHED)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
