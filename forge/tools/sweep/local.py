"""Run the trials of a sweep as processes on this machine, without repeating finished runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forge.observe.json_lines import read_object
from forge.runtime.children import die_with_parent
from forge.runtime.errors import STOPPED, UserError
from forge.tools.sweep.results import ENDED, SweepResult, check_runs, result_of, rows, write_table
from forge.tools.sweep.spec import Sweep, Trial, first_trials, next_trials

TRAIN = Path(__file__).resolve().parents[3] / "train.py"


def run_sweep(
    sweep: Sweep, report: Callable[[list[SweepResult]], None], train: Sequence[str] | None = None
) -> list[SweepResult]:
    """Train all unfinished runs of the sweep. Return the results of all rungs (rounds of successive halving).

    After each run, write `table.json` to the sweep's folder and call `report` with the results so far. The table depends
    only on the runs, so a killed and restarted sweep ends with an equal table. A failed run has no result. train: the
    command of a run; None: train.py of this checkout.

    Raises UserError if an existing run was made with other values. Raises UserError with exit code 75 if a run was
    stopped or the time limit was reached.
    """
    sweep.folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    trials, before = first_trials(sweep), list[SweepResult]()
    while trials:
        _make(sweep, trials, before, report, train or command(sweep), began)
        results = [result_of(sweep, trial) for trial in trials]
        before += results
        trials = next_trials(sweep, trials, {one.trial.number: one.mean for one in results if one.done})
    return before


def command(sweep: Sweep) -> list[str]:
    """Return the command that starts a run of the sweep, without the arguments of train.py."""
    if sweep.processes == 1:
        return [sys.executable, str(TRAIN)]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={sweep.processes}", str(TRAIN)),
    ]


def _make(
    sweep: Sweep,
    trials: list[Trial],
    before: list[SweepResult],
    report: Callable[[list[SweepResult]], None],
    train: Sequence[str],
    began: float,
) -> None:
    """Train the unfinished runs of one rung, `workers` at a time. before: results of earlier rungs.

    began: start of the sweep, from time.monotonic(). After an exception, e.g. Ctrl-C, stop all running processes and wait
    for them.
    """
    check_runs(sweep, trials)

    def show() -> None:
        results = [*before, *(result_of(sweep, trial) for trial in trials)]
        write_table(sweep.folder / "table.json", rows(results, list(sweep.keys)))
        report(results)

    # Load the recipes before a run starts: an error in a recipe would stop all running processes.
    waiting = [
        (trial.run_name(seed), trial.options(sweep, seed))
        for trial in trials
        for place, seed in enumerate(sweep.seeds)
        if result_of(sweep, trial).states[place] not in ENDED
    ]
    running: dict[subprocess.Popen[bytes], Path] = {}
    failed: list[str] = []
    show()
    try:
        while waiting or running:
            over = sweep.budget_minutes and time.monotonic() - began > 60 * sweep.budget_minutes
            if over and waiting:
                waiting.clear()
                failed.append(f"budget_minutes = {sweep.budget_minutes:g} is used up")
            while waiting and len(running) < sweep.workers:
                name, options = waiting.pop(0)
                running[_start(sweep, name, [*train, *options])] = sweep.folder / name
            ended = [process for process in running if process.poll() is not None]
            for process in ended:
                status = read_object(running.pop(process) / "status.json")
                # torchrun exits with 1 after a stop.
                stopped = process.returncode and status.get("state") == "stopped" and "refused" not in status
                if (process.returncode == STOPPED or stopped) and not status.get("final"):
                    failed.append("a run was stopped")
                show()
            if not ended:
                time.sleep(0.2)
    except BaseException:
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait()
        raise
    if failed:
        raise UserError(f"{failed[0]}; the same command continues from here", exit_code=STOPPED)


def _start(sweep: Sweep, name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    # The kernel kills the launcher when the sweep dies. This variable makes the ranks die with their launcher.
    environment = os.environ | {"FORGE_END_WITH_LAUNCHER": "1"}
    if sweep.threads:
        environment["OMP_NUM_THREADS"] = str(sweep.threads)
    with (sweep.folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C then reaches only the sweep; the sweep stops the runs
            preexec_fn=die_with_parent,  # a restarted sweep can then lock the run's folder
        )
