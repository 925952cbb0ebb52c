"""A sweep as a job array of Slurm: each task of the array makes one run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from forge.errors import UserError
from forge.sweep.local import command
from forge.sweep.results import result_of
from forge.sweep.spec import Sweep, Trial, first_trials, next_trials


def pending(sweep: Sweep) -> list[tuple[Trial, int]]:
    """Return trial and seed of each run of the present rung that is not finished; empty when all rungs are done."""
    trials = first_trials(sweep)
    while trials:
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
    """Return a script for sbatch that makes all pending runs, `workers` at a time. Raises UserError if none is pending.

    A task that is stopped, by a time limit for example, is requeued exactly when its status says so.
    """
    runs = pending(sweep)
    if not runs:
        raise UserError(
            "all runs of the sweep are finished; without --slurm the same command prints the table"
        )
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={sweep.name}",
        f"#SBATCH --array=0-{len(runs) - 1}%{sweep.workers}",
        f"#SBATCH --output={sweep.folder}/slurm-%A-%a.log",
        "#SBATCH --signal=B:TERM@300",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"cd {shlex.quote(str(Path.cwd()))}",
        *([f"export OMP_NUM_THREADS={sweep.threads}"] if sweep.threads else []),
        "case $SLURM_ARRAY_TASK_ID in",
    ]
    for number, (trial, seed) in enumerate(runs):
        options = trial.options(sweep, seed)
        lines.append(f"{number}) run={trial.run_name(seed)}; options=({shlex.join(options)});;")
    lines += [
        "esac",
        f'{shlex.join(command(sweep))} "${{options[@]}}" &',
        "trap 'kill -TERM $!' TERM",
        "wait $!; wait $!",
        f"status={shlex.quote(str(sweep.folder))}/$run/status.json",
        f"state=$({shlex.quote(sys.executable)} -c "
        "'import json, sys; print(json.load(open(sys.argv[1]))[\"state\"])' $status)",
        'if [ "$state" = stopped ]; then scontrol requeue ${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}; fi',
    ]
    return "\n".join(lines) + "\n"
