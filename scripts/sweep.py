#!/usr/bin/env python
"""Train the runs of a sweep and rank them. A sweep is a grid, a random search or successive halving over any keys.

    python scripts/sweep.py sweep.toml
    python scripts/sweep.py sweep.toml --slurm > array.sbatch

Runs are ordinary run directories in OUTPUT_DIR/NAME/. After any stop the same command continues, without repeating finished
runs. At the end the command writes a table (table.json) and a page about the runs (report.html, which needs the extra
forge[report]). The exit code is 1 if a trial has no result.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.config.keys import to_literal
from forge.runtime.errors import FAILED, MissingExtra, UserError
from forge.runtime.files import replace_atomically
from forge.tools.report.read import read_runs
from forge.tools.sweep.local import run_sweep
from forge.tools.sweep.results import ENDED, SweepResult, as_text, rows
from forge.tools.sweep.slurm import job_array
from forge.tools.sweep.spec import Sweep, read_sweep
from scripts.options import Options, exit_code_of


def main(arguments: list[str] | None = None) -> int:
    """Make and rank the runs, or print their job array, and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add("sweep", type=Path, help="the file of the sweep; docs/guides/recipes.md describes it")
    add(
        "--slurm",
        action="store_true",
        help="print an sbatch job array with all pending runs, instead of running them",
    )
    given = parser.parse_args(arguments)
    stopped = "interrupted; the runs have saved, and the same command continues"
    return exit_code_of(lambda: _run(given), stopped)


def _run(given: argparse.Namespace) -> None:
    sweep = read_sweep(given.sweep)
    if given.slurm:
        sweep.folder.mkdir(parents=True, exist_ok=True)
        print(job_array(sweep), end="")
        return
    live = Live(sweep)
    results = run_sweep(sweep, live.show)
    print(live.text(results))
    best = next((row for row in rows(results, list(sweep.keys)) if row["result"] is not None), None)
    if best is not None:
        # --config takes a bare path, not a TOML string.
        winner = shlex.join(
            f"--{key}={best[key] if key == 'config' else to_literal(best[key])}" for key in sweep.keys
        )
        print(f"best: trial {best['trial']}, {sweep.metric} {best['result']:.5g}: {winner}")
        _page(sweep, results, winner)
    if without := [one for one in results if not one.done]:
        raise UserError(_without_result(sweep, without, len(results)), FAILED)


def _without_result(sweep: Sweep, without: list[SweepResult], trials: int) -> str:
    """Return the message about the trials `without` a result. trials: number of all trials."""
    states = {
        one.trial.run_name(seed): state
        for one in without
        for seed, state in zip(sweep.seeds, one.states, strict=True)
    }
    numbers = ", ".join(str(one.trial.number) for one in without)
    sentences = [
        f"{len(without)} of {trials} trials have no result: {numbers}; the log of each run is in {sweep.folder}"
    ]
    if set(states.values()) - {*ENDED}:
        sentences.append("to repeat the failed runs, give the same command again")
    if finished := [name for name, state in states.items() if state == "no result"]:
        folders = "folder" if len(finished) == 1 else "folders"
        sentences.append(
            f"ended without {sweep.metric}: {', '.join(finished)}; to repeat, first remove the {folders}"
        )
    return "; ".join(sentences)


class Live:
    """Progress of the sweep: on a terminal, the redrawn table; otherwise one line per finished trial."""

    def __init__(self, sweep: Sweep):
        self._sweep, self._terminal = sweep, sys.stdout.isatty()
        self._seen: set[tuple[int, int]] = set()

    def text(self, results: list[SweepResult]) -> str:
        return as_text(rows(results, list(self._sweep.keys)))

    def show(self, results: list[SweepResult]) -> None:
        if self._terminal:
            print(f"\033[2J\033[H{self.text(results)}", flush=True)
            return
        for result in results:
            place = result.trial.rung, result.trial.number
            if result.done and place not in self._seen:
                self._seen.add(place)
                done = sum(one.done for one in results)
                print(
                    f"trial {result.trial.number}: {result.mean:.5g} ({done} of {len(results)})", flush=True
                )


def _page(sweep: Sweep, results: list[SweepResult], winner: str) -> None:
    try:
        from forge.tools.report.draw import Curve, curves
        from forge.tools.report.page import make_page
        from forge.tools.report.parts import PageSection, Part, Picture, Table, TextBlock
    except MissingExtra as error:
        print(f"no page: {error}")
        return
    table = rows(results, list(sweep.keys))
    parts: list[Part] = [
        TextBlock("Overrides of the best trial", winner),
        Table(f"Trials by {sweep.metric}", list(table[0]), [list(row.values()) for row in table]),
    ]
    done = [row for row in table if row["result"] is not None]
    for number, key in enumerate(sweep.keys):
        points = sorted((row[key], row["result"]) for row in done if isinstance(row[key], int | float))
        if len({x for x, _ in points}) < 2:
            continue
        rungs = sorted({row["rung"] for row in done})
        slices = [
            Curve(
                f"rung {rung}" if len(rungs) > 1 else sweep.metric,
                _least((row[key], row["result"]) for row in done if row["rung"] == rung),
                color=rung,
            )
            for rung in rungs
        ]
        xs = [x for x, _ in points]
        log_x = min(xs) > 0 and max(xs) > 8 * min(xs)
        drawing = curves(f"slice{number}", slices, sweep.metric, x=key, log_x=log_x)
        caption = f"The best {sweep.metric} at each {key}"
        parts.append(Picture(caption, drawing, Table(caption, [key, sweep.metric], points)))
    runs = [sweep.folder / result.trial.run_name(sweep.seeds[0]) for result in results if result.done]
    page = make_page(read_runs(runs), extra=[PageSection("The sweep", parts=parts)])
    replace_atomically(sweep.folder / "report.html", page.encode())
    print(f"wrote {sweep.folder / 'report.html'}")


def _least(points) -> tuple[list[float], list[float]]:  # type: ignore[no-untyped-def]
    """Return the distinct x in ascending order, and the least value at each x. points: (x, value)."""
    least: dict[float, float] = {}
    for x, value in points:
        least[x] = min(value, least.get(x, value))
    return sorted(least), [least[x] for x in sorted(least)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
