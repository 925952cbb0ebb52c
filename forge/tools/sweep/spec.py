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
from forge.runtime.files import is_url
from forge.runtime.remote import join

# A text without control characters, safe in scripts and terminals.
Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$")]


class Between(Section):
    """The range of a key, for random search and successive halving. log: draw uniformly in the logarithm."""

    low: float
    high: float
    log: bool = False


class Sweep(Section):
    """A sweep: one recipe, the keys to vary, and their values."""

    config: Text
    """The recipe: a path or a name in configs/."""
    name: Line = "sweep"
    """Name of the sweep's folder in output_dir. It holds one run directory per trial, rung and seed."""
    output_dir: Line = "runs"
    """Parent of the sweep's folder."""
    method: Literal["grid", "random", "halving"] = "grid"
    """grid: every combination. random: `trials` draws. halving: random draws; each rung trains the best ones longer."""
    trials: Positive = 8
    """random, halving: number of draws."""
    draw: Count = 0
    """random, halving: seed of the draws."""
    eta: Positive = 3
    """halving: from rung to rung, keep the best 1/eta of the trials and train them eta times longer."""
    rungs: Positive = 2
    """halving: number of rungs. Runs of the last rung have the recipe's length."""
    seeds: ListOf[Count] = (0,)
    """Values of run.seed. Each trial makes one run per seed and is ranked by the mean."""
    metric: Text = "loss"
    """Metric to minimise. loss: training loss, mean of the last tenth of the lines. eval.NAME: held-out loss at the end."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the recipe for all trials."""
    keys: dict[str, list[Any] | Between]
    """Key of the recipe -> list of values, or a table with low, high and log. The key `config` varies the recipe itself."""
    workers: Positive = 1
    """Number of concurrent runs on this machine."""
    processes: Positive = 1
    """Processes per run; more than one start under torchrun."""
    threads: Count = 0
    """OMP_NUM_THREADS of each process. 0: leave the environment unchanged."""
    budget_tokens: Count = 0
    """Limit of the tokens of all runs in all rungs. The last trials are dropped until the rest fits. 0: no limit."""
    budget_minutes: NonNegativeNumber = 0.0
    """Start no run after this many minutes. 0: no limit."""

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name


@dataclass(frozen=True)
class Trial:
    """One choice of values for the swept keys.

    steps, tokens: length of the trial's runs in this rung; 0: that of the recipe.
    """

    number: int
    values: dict[str, Any]
    rung: int = 0
    steps: int = 0
    tokens: int = 0

    def run_name(self, seed: int) -> str:
        return f"trial-{self.number:03d}-rung-{self.rung}-seed-{seed}"

    def options(self, sweep: Sweep, seed: int) -> list[str]:
        """Return the arguments of train.py for the run with run.seed = `seed`.

        Raises UserError if the configuration is invalid.
        """
        arguments, mirror = self.recipe_options(sweep, seed), config_of(sweep, self, seed).checkpoint.mirror
        return [*arguments, f"--checkpoint.mirror={to_literal(mirror)}"] if mirror else arguments

    def recipe_options(self, sweep: Sweep, seed: int) -> list[str]:
        """Return `options` with the recipe's checkpoint.mirror."""
        keys = {**sweep.overrides, **self.values, "run.seed": seed, "run.name": self.run_name(seed)}
        keys["run.output_dir"] = str(sweep.folder)
        if self.tokens:
            keys["train.tokens"] = self.tokens
        elif self.steps:
            keys |= {"train.steps": self.steps, "train.tokens": 0}
        config = keys.pop("config", sweep.config)
        return ["--config", config, *(f"--{key}={to_literal(value)}" for key, value in keys.items())]


def check_metric(metric: str, config: Config, what: str) -> None:
    """Raise UserError if a run of `config` does not measure `metric`. what: the setting, for the message."""
    known = ["loss"]
    if config.evaluate.interval:
        known += [f"eval.{source.name}" for source in config.data.validation]
    if metric not in known:
        raise UserError(f"{what}: is not measured. Known: {', '.join(known)}{did_you_mean(metric, known)}")


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file and check the configuration of every trial. Raises UserError for an invalid file or trial."""
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
    for key in sweep.keys:
        if sweep.method == "halving" and key in ("train.steps", "train.tokens"):
            raise UserError(
                f"{path}: keys.{key}: is set by method = halving; give the length of the last rung under overrides"
            )
    for key in (*sweep.keys, *sweep.overrides):
        if key in ("run.seed", "run.name", "run.output_dir"):
            raise UserError(
                f"{path}: {key}: is set by the sweep; use seeds = [0, 1] for several seeds, or remove this key"
            )
    if not sweep.seeds or len(set(sweep.seeds)) < len(sweep.seeds):
        raise UserError(f"{path}: seeds = {list(sweep.seeds)}: needs at least one value, each once")
    for trial in first_trials(sweep):
        config = config_of(sweep, trial)
        check_metric(sweep.metric, config, f"{path}: metric = {sweep.metric}")
        if config.checkpoint.mirror and "name" not in sweep.model_fields_set:
            raise UserError(
                f"{path}: name: is missing; with checkpoint.mirror a sweep needs a name of its own, because the copies of "
                "its runs are in URL/NAME"
            )
        if sweep.method == "halving" and config.checkpoint.resume not in ("auto", "none"):
            raise UserError(
                f"{path}: checkpoint.resume = {config.checkpoint.resume!r}: method = halving trains every run from step 0; "
                "to begin with the weights of this checkpoint, set checkpoint.init instead"
            )
    return sweep


def config_of(sweep: Sweep, trial: Trial, seed: int | None = None) -> Config:
    """Return the configuration of the trial's run with run.seed = `seed` (None: the first seed of the sweep).

    The sweep's name becomes part of checkpoint.mirror, because runs of other sweeps have the same names. Raises UserError
    if the configuration is invalid.
    """
    config = load_config(trial.recipe_options(sweep, sweep.seeds[0] if seed is None else seed))
    if not is_url(config.checkpoint.mirror):
        return config
    mirror = {"mirror": join(config.checkpoint.mirror, sweep.name)}
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=mirror)})


def first_trials(sweep: Sweep) -> list[Trial]:
    """Return the trials of the first rung, as many as budget_tokens allows. Equal sweeps give equal trials.

    Raises UserError if the budget is too small for one trial.
    """
    lengths = _lengths_of_rungs(sweep)
    trials = [Trial(number, values, 0, **lengths[0]) for number, values in enumerate(_values(sweep))]
    if not sweep.budget_tokens:
        return trials
    tokens = [[_tokens(sweep, replace(trial, **length)) for trial in trials] for length in lengths]
    for number in range(len(trials), 0, -1):
        if _tokens_of_all(sweep, [rung[:number] for rung in tokens]) <= sweep.budget_tokens:
            return trials[:number]
    least = _tokens_of_all(sweep, [rung[:1] for rung in tokens])
    raise UserError(f"budget_tokens = {sweep.budget_tokens}: is less than the {least} tokens of one trial")


def next_trials(sweep: Sweep, trials: list[Trial], results: dict[int, float]) -> list[Trial]:
    """Return the trials of the next rung: the best of `trials`. Empty after the last rung.

    results: trial number -> metric; trials without a result are dropped.
    """
    rung, lengths = trials[0].rung + 1, _lengths_of_rungs(sweep)
    if rung == len(lengths):
        return []
    ranked = sorted(
        (trial for trial in trials if trial.number in results), key=lambda t: (results[t.number], t.number)
    )
    kept = ranked[: _survivors(sweep, len(trials))]
    return [replace(trial, rung=rung, **lengths[rung]) for trial in sorted(kept, key=lambda t: t.number)]


def _lengths_of_rungs(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the length of a run in each rung, in the unit of the recipe: {"tokens": N} or {"steps": N}. {}: the recipe's.

    Raises UserError if the recipes of a halving sweep have different lengths.
    """
    if sweep.method != "halving":
        return [{}]
    (unit, longest), *others = {_length(sweep, recipe) for recipe in _recipes(sweep)}
    if others:
        raise UserError(
            "keys.config: the recipes train for different numbers of steps or tokens; with method = halving, give the "
            "length of the last rung under overrides"
        )
    shortest = max(1, longest // sweep.eta ** (sweep.rungs - 1))
    return [*({unit: shortest * sweep.eta**rung} for rung in range(sweep.rungs - 1)), {unit: longest}]


def _recipes(sweep: Sweep) -> list[str]:
    recipes = sweep.keys.get("config")
    return recipes if isinstance(recipes, list) else [sweep.overrides.get("config", sweep.config)]


def _length(sweep: Sweep, recipe: str) -> tuple[str, int]:
    """Return the unit and the length of a run of `recipe`."""
    train = config_of(sweep, Trial(0, {"config": recipe}), 0).train
    return ("tokens", train.tokens) if train.tokens else ("steps", train.steps)


def _survivors(sweep: Sweep, trials: int) -> int:
    return max(1, trials // sweep.eta)


def _tokens(sweep: Sweep, trial: Trial) -> int:
    """Return the tokens of a trial's runs, over all seeds."""
    config = config_of(sweep, trial)
    return Phases(config).tokens_after(config.train.steps) * len(sweep.seeds)


def _tokens_of_all(sweep: Sweep, tokens: list[list[int]]) -> int:
    """Return an upper bound of a sweep's tokens: the tokens if the most expensive trials survive every rung.

    tokens: for each rung, the tokens of each trial.
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
