"""`Sweep`: the content of a sweep file, and its trials."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError

from forge.config import Config, load_config
from forge.config.keys import read_toml, to_literal
from forge.config.phases import Phases
from forge.config.section import Count, ListOf, NonNegativeNumber, Positive, Section, Text
from forge.runtime.errors import UserError, did_you_mean

# A name that fits on one line of a script or a terminal.
Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$")]


class Between(Section):
    """The range of a key in a random search or in successive halving. log: draw uniformly in the logarithm."""

    low: float
    high: float
    log: bool = False


class Sweep(Section):
    """A sweep: one recipe, the keys to vary, and their values."""

    config: Text
    """The recipe: a path or a name in configs/."""
    name: Line = "sweep"
    """Folder of the sweep within output_dir, with one run directory per trial and seed."""
    output_dir: Line = "runs"
    """Folder of the sweep's folder."""
    method: Literal["grid", "random", "halving"] = "grid"
    """grid: every combination; random: `trials` draws; halving: random draws, of which the best are trained again, longer."""
    trials: Positive = 8
    """random, halving: number of draws."""
    draw: Count = 0
    """random, halving: seed of the draws."""
    eta: Positive = 3
    """halving: keep the best 1/eta of the trials, and train them eta times longer."""
    rungs: Positive = 2
    """halving: number of run lengths. The last length is the recipe's."""
    seeds: ListOf[Count] = (0,)
    """Values of run.seed: each trial is made with all of them, and ranked by the mean."""
    metric: Text = "loss"
    """Metric to minimise: loss (training, mean of the last tenth of the lines), or eval.NAME (held out, the last)."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the recipe for all trials."""
    keys: dict[str, list[Any] | Between]
    """Keys of the recipe and their values: a list, or a table with low, high and log. `config` is a key, too."""
    workers: Positive = 1
    """Runs at the same time on this machine."""
    processes: Positive = 1
    """Processes of each run, under torchrun if more than one."""
    threads: Count = 0
    """Threads of each process on a CPU. 0: not set here."""
    budget_tokens: Count = 0
    """Tokens of all runs of all rungs together; the last trials are dropped until the rest fits. 0: no limit."""
    budget_minutes: NonNegativeNumber = 0.0
    """Minutes after which no run is started. 0: no limit."""

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name


@dataclass(frozen=True)
class Trial:
    """One choice of values for the swept keys. steps: number of steps of the trial's runs; 0: as in the recipe."""

    number: int
    values: dict[str, Any]
    rung: int = 0
    steps: int = 0

    def run_name(self, seed: int) -> str:
        return f"trial-{self.number:03d}-rung-{self.rung}-seed-{seed}"

    def options(self, sweep: Sweep, seed: int) -> list[str]:
        """Return train.py's arguments for the run with `seed`."""
        keys = {**sweep.overrides, **self.values, "run.seed": seed, "run.name": self.run_name(seed)}
        keys["run.output_dir"] = str(sweep.folder)
        if self.steps:
            keys |= {"train.steps": self.steps, "train.tokens": 0}
        config = keys.pop("config", sweep.config)
        return ["--config", config, *(f"--{key}={to_literal(value)}" for key, value in keys.items())]


def read_sweep(path: Path) -> Sweep:
    """Read a sweep's file and check every trial's configuration. Raises UserError with all mistakes."""
    try:
        tree = read_toml(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    try:
        sweep = Sweep.model_validate(tree)
    except ValidationError as error:
        lines = []
        for one in error.errors():
            key, message = ".".join(map(str, one["loc"])), one["msg"]
            if one["type"] == "extra_forbidden":
                message = "no such key" + did_you_mean(key, Sweep.model_fields)
            elif one["type"] == "string_pattern_mismatch":
                message = f"{one['input']!r}: must be one line of text without control characters"
            lines.append(f"{key}: {message}")
        raise UserError(f"{path}: {'; '.join(lines)}; docs/guides/recipes.md has an example") from None
    for key, values in sweep.keys.items():
        if isinstance(values, Between) and (sweep.method == "grid" or values.low >= values.high):
            needed = "a list of values" if sweep.method == "grid" else "low below high"
            raise UserError(f"{path}: keys.{key}: needs {needed} with method = {sweep.method}")
        if isinstance(values, Between) and values.log and values.low <= 0:
            raise UserError(f"{path}: keys.{key}.low = {values.low}: must be above 0 with log = true")
        if isinstance(values, list) and not values:
            raise UserError(f"{path}: keys.{key}: has no values")
    for trial in first_trials(sweep):
        config_of(sweep, trial)
    return sweep


def config_of(sweep: Sweep, trial: Trial, seed: int | None = None) -> Config:
    """Return the configuration of a trial's run.

    seed: of the run; None: the first seed of the sweep. Raises UserError if the configuration is invalid.
    """
    return load_config(trial.options(sweep, sweep.seeds[0] if seed is None else seed))


def first_trials(sweep: Sweep) -> list[Trial]:
    """Return the trials of the first rung, as many as the budget of tokens allows. A pure function of the sweep."""
    steps = _steps_of_rungs(sweep)
    trials = [Trial(number, values, 0, steps[0]) for number, values in enumerate(_values(sweep))]
    if not sweep.budget_tokens:
        return trials
    tokens = [[_tokens(sweep, replace(trial, steps=length)) for trial in trials] for length in steps]
    for number in range(len(trials), 0, -1):
        if _tokens_of_all(sweep, [rung[:number] for rung in tokens]) <= sweep.budget_tokens:
            return trials[:number]
    least = _tokens_of_all(sweep, [rung[:1] for rung in tokens])
    raise UserError(f"budget_tokens = {sweep.budget_tokens}: is less than the {least} tokens of one trial")


def next_trials(sweep: Sweep, trials: list[Trial], results: dict[int, float]) -> list[Trial]:
    """Return the trials of the next rung: the best by `results` (trial number -> metric). Empty after the last rung."""
    rung, steps = trials[0].rung + 1, _steps_of_rungs(sweep)
    if rung == len(steps):
        return []
    ranked = sorted(
        (trial for trial in trials if trial.number in results), key=lambda t: (results[t.number], t.number)
    )
    kept = ranked[: _survivors(sweep, len(trials))]
    return [replace(trial, rung=rung, steps=steps[rung]) for trial in sorted(kept, key=lambda t: t.number)]


def _steps_of_rungs(sweep: Sweep) -> list[int]:
    """Return the number of steps of a run in each rung; 0: as in the recipe."""
    if sweep.method != "halving":
        return [0]
    longest = load_config(Trial(0, {}).options(sweep, 0)).train.steps
    shortest = max(1, longest // sweep.eta ** (sweep.rungs - 1))
    return [*(shortest * sweep.eta**rung for rung in range(sweep.rungs - 1)), longest]


def _survivors(sweep: Sweep, trials: int) -> int:
    return max(1, trials // sweep.eta)


def _tokens(sweep: Sweep, trial: Trial) -> int:
    """Return the tokens of a trial's runs."""
    config = config_of(sweep, trial)
    return Phases(config).tokens_after(config.train.steps) * len(sweep.seeds)


def _tokens_of_all(sweep: Sweep, tokens: list[list[int]]) -> int:
    """Return an upper bound of the tokens of a whole sweep.

    tokens: of each trial in each rung. It assumes that the most expensive trials survive.
    """
    total, number = 0, len(tokens[0])
    for rung in tokens:
        total += sum(sorted(rung, reverse=True)[:number])
        number = _survivors(sweep, number)
    return total


def _values(sweep: Sweep) -> Iterator[dict[str, Any]]:
    if sweep.method == "grid":
        lists = [values for values in sweep.keys.values() if isinstance(values, list)]
        for chosen in product(*lists):
            yield dict(zip(sweep.keys, chosen, strict=True))
        return
    drawn = random.Random(sweep.draw)
    for _ in range(sweep.trials):
        yield {key: _draw(values, drawn) for key, values in sweep.keys.items()}


def _draw(values: list[Any] | Between, drawn: random.Random) -> Any:
    if isinstance(values, list):
        return drawn.choice(values)
    if values.log:
        value = math.exp(drawn.uniform(math.log(values.low), math.log(values.high)))
    else:
        value = drawn.uniform(values.low, values.high)
    return float(f"{value:.4g}")  # rounded, so that the table shows the exact value
