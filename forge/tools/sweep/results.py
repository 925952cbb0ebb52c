"""Read the results of a sweep from its run directories."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.config import parse_toml_text
from forge.config.keys import difference
from forge.config.phases import without_microbatches
from forge.observe.json_lines import read_lines, read_object
from forge.runtime.errors import UserError
from forge.runtime.files import replace_atomically
from forge.tools.sweep.spec import Sweep, Trial, config_of

ENDED = ("finished", "ended early", "no result")
"""States of runs that the sweep does not start again."""


@dataclass(frozen=True)
class SweepResult:
    """A trial and the results of its runs. values: metric of each finished run. states: state of each seed's run.

    tokens: number of tokens of all these runs.
    """

    trial: Trial
    values: list[float]
    states: list[str]
    tokens: int

    @property
    def done(self) -> bool:
        return bool(self.values) and len(self.values) == len(self.states)

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds; 0 for a single seed."""
        if len(self.values) < 2:
            return 0.0
        return math.sqrt(sum((value - self.mean) ** 2 for value in self.values) / (len(self.values) - 1))


def result_of(sweep: Sweep, trial: Trial) -> SweepResult:
    """Read a trial's result so far from the run directory of each seed. Call `check_runs` first."""
    values, states, tokens = [], [], 0
    for seed in sweep.seeds:
        path = sweep.folder / trial.run_name(seed)
        status = read_object(path / "status.json")
        state = str(status.get("state", "waiting"))
        if state == "stopped" and status.get("final"):
            state = "ended early"  # by a hook
        elif state == "stopped" and "refused" in status:
            state = "failed"  # the same command would be refused again
        lines = read_lines(path / "metrics.jsonl", "step") if path.exists() else []
        tokens += max((line.get("tokens", 0) for line in lines), default=0)
        ended = state in ENDED
        value = metric_of(lines, sweep.metric, last_step=state == "finished") if ended else None
        if ended and value is None:
            state = "no result"
        states.append(state)
        values += [value] if value is not None else []
    return SweepResult(trial, values, states, tokens)


def check_runs(sweep: Sweep, trials: Iterable[Trial]) -> None:
    """Raise UserError if the configuration of an existing run differs from its trial.

    The name of a run directory has the number of the trial. After an edit of the sweep file, a trial may have other values
    than the existing run with its number.
    """
    for trial in trials:
        for seed in sweep.seeds:
            path = sweep.folder / trial.run_name(seed)
            file = path / "config.toml"
            if not file.exists():
                continue
            made = parse_toml_text(file.read_text("utf-8"), str(file), stored=True)
            wanted = config_of(sweep, trial, seed)
            # The sweep and its mirror may have been moved, and the run may have used a fallback.
            fallbacks = " ".join(wanted.parallel.fallbacks).split()
            free = {"run.output_dir", "checkpoint.mirror"}
            free |= {*(one.removeprefix("--").partition("=")[0] for one in fallbacks)}
            for key, there, here in difference(made, wanted):
                if key == "phase" and "train.micro_batch_size" in free:
                    there, here = without_microbatches(there or ()), without_microbatches(here or ())
                if key not in free and there != here:
                    raise UserError(
                        f"{path}: was made with {key} = {there}, but the sweep has {here}: give the edited sweep another "
                        "name, or remove this run's folder"
                    )


def metric_of(lines: Sequence[dict[str, Any]], metric: str, last_step: bool = True) -> float | None:
    """Return the metric from the lines of metrics.jsonl; None if it is missing or not finite.

    metric: "loss": mean training loss over the last tenth of the lines. "eval.NAME": held-out loss after the last step.
    last_step: False: take the last held-out loss, after any step.
    """
    if metric.startswith("eval."):
        name = metric.removeprefix("eval.")
        # The last step has a training line and an evaluation, unless the evaluation failed or the run ended early.
        last = max((line["step"] for line in lines if "loss" in line), default=0) if last_step else 0
        found = [line["eval"].get(name) for line in lines if "eval" in line and line["step"] >= last]
        return found[-1] if found else None
    losses = [line["loss"] for line in lines if "loss" in line and not line.get("skipped")]
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last) if last and None not in last else None


def rows(results: Iterable[SweepResult], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row per trial and rung, the last rung first. keys: the swept keys.

    Within a rung, finished trials come first, from best to worst. Unfinished trials follow, by number.
    """
    ranked = sorted(
        results, key=lambda r: (-r.trial.rung, not r.done, r.mean if r.done else 0.0, r.trial.number)
    )
    return [
        {
            "trial": result.trial.number,
            "rung": result.trial.rung,
            **{key: result.trial.values[key] for key in keys},
            "result": result.mean if result.done else None,
            "spread": result.spread if result.done else None,
            "tokens": result.tokens,
            "state": result.states[0] if len(set(result.states)) == 1 else ", ".join(result.states),
        }
        for result in ranked
    ]


def as_text(table: Sequence[dict[str, Any]]) -> str:
    """Return the rows of `table` as text, with aligned columns."""
    head = list(table[0])
    cells = [[_shown(row[name]) for name in head] for row in table]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines = [head, *cells]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def write_table(path: Path, table: Sequence[dict[str, Any]]) -> None:
    """Write the table as JSON, atomically."""
    replace_atomically(path, (json.dumps(list(table), indent=1) + "\n").encode())


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
