"""A sweep as a job array of Slurm: each task of the array makes one run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from forge.runtime.errors import UserError
from forge.tools.sweep.local import TRAIN, command
from forge.tools.sweep.results import check_runs, result_of
from forge.tools.sweep.spec import Sweep, Trial, first_trials, next_trials


def pending(sweep: Sweep) -> list[tuple[Trial, int]]:
    """Return trial and seed of each unfinished run of the current rung; empty after the last rung."""
    trials = first_trials(sweep)
    while trials:
        check_runs(sweep, trials)
        results = [result_of(sweep, trial) for trial in trials]
        left = [
            (result.trial, seed)
            for result in results
            for seed, state in zip(sweep.seeds, result.states, strict=True)
            if state not in ("finished", "no result")
        ]
        if left:
            return left
        trials = next_trials(sweep, trials, {one.trial.number: one.mean for one in results if one.done})
    return []


def job_array(sweep: Sweep) -> str:
    """Return an sbatch script for all pending runs, `workers` at a time. Raises UserError if none is pending.

    `scripts/slurm/array_task.py` runs a task, requeues it after a stop, and ends with the exit code of its run.
    """
    runs = pending(sweep)
    if not runs:
        raise UserError(
            "all runs of the sweep are finished; without --slurm the same command prints the table"
        )
    log = shlex.quote(f"{sweep.folder}/slurm-") + "${SLURM_ARRAY_JOB_ID}-${SLURM_ARRAY_TASK_ID}.log"
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={re.sub(r'[^A-Za-z0-9._-]', '-', sweep.name)}",
        f"#SBATCH --array=0-{len(runs) - 1}%{sweep.workers}",
        # sbatch has its own quotes and patterns for names of files, so the script opens the log.
        "#SBATCH --output=/dev/null",
        "#SBATCH --signal=B:TERM@300",
        "#SBATCH --requeue",
        f"cd {shlex.quote(str(Path.cwd()))} || exit",
        f"exec >> {log} 2>&1 || exit",
        *([f"export OMP_NUM_THREADS={sweep.threads}"] if sweep.threads else []),
        "case $SLURM_ARRAY_TASK_ID in",
    ]
    for number, (trial, seed) in enumerate(runs):
        options = shlex.join(trial.options(sweep, seed))
        lines.append(f"{number}) run={trial.run_name(seed)}; options=({options});;")
    task = shlex.join([sys.executable, str(TRAIN.parent / "scripts" / "slurm" / "array_task.py")])
    lines += [
        "esac",
        f'exec {task} {shlex.quote(str(sweep.folder))}/$run {shlex.join(command(sweep))} "${{options[@]}}"',
    ]
    return "\n".join(lines) + "\n"
