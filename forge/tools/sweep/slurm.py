"""Write a sweep as a Slurm job array, with one task per run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from forge.runtime.errors import UserError
from forge.tools.sweep.local import TRAIN, command
from forge.tools.sweep.results import ENDED, check_runs, result_of
from forge.tools.sweep.spec import Sweep, Trial, first_trials, next_trials


def pending(sweep: Sweep) -> list[tuple[Trial, int]]:
    """Return (trial, seed) of each run of the current rung that has not ended. Empty if all rungs have ended.

    If only failed runs are left of a rung, the next rung begins without their trials, as in `run_sweep`.
    """
    trials = first_trials(sweep)
    while trials:
        check_runs(sweep, trials)
        results = [result_of(sweep, trial) for trial in trials]
        left = [
            (result.trial, seed)
            for result in results
            for seed, state in zip(sweep.seeds, result.states, strict=True)
            if state not in ENDED
        ]
        further = next_trials(sweep, trials, {one.trial.number: one.mean for one in results if one.done})
        states = {state for result in results for state in result.states}
        if left and not (further and states <= {*ENDED, "failed"}):
            return left
        trials = further
    return []


def job_array(sweep: Sweep) -> str:
    """Return an sbatch script for all pending runs, `workers` at a time. Raises UserError if none is pending.

    Each task starts `scripts/slurm/array_task.py`. That script makes the run, requeues the task after a stop, and exits with
    the run's exit code.
    """
    runs = pending(sweep)
    if not runs:
        raise UserError("all runs of the sweep have ended; without --slurm the same command prints the table")
    log = shlex.quote(f"{sweep.folder}/slurm-") + "${SLURM_ARRAY_JOB_ID}-${SLURM_ARRAY_TASK_ID}.log"
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={re.sub(r'[^A-Za-z0-9._-]', '-', sweep.name)}",
        f"#SBATCH --array=0-{len(runs) - 1}%{sweep.workers}",
        # The script opens the log itself, because sbatch would interpret quotes and patterns in the file name.
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
