"""Optimizers compared by held-out loss at equal steps and at equal time, each with its best learning rate.

    python benchmarks/recipes.py                                           after `make data`; two hours on two CPU cores
    python benchmarks/recipes.py --steps 100 --seeds 1 --train.global_batch_size=4
    python benchmarks/recipes.py --only adamw muon --rates 1e-3 3e-3 1e-2

Makes whole runs of train.py, one after another. With the first seed, every optimizer trains with all learning rates. With
the other seeds, it trains only with the rate of lowest held-out loss. The script draws the losses of the best runs by steps
and by time. The time is the number of steps times the run's median step time, so other work on the machine does not show.
Prints the table, and writes table and curves to benchmarks/results/. Other --section.key=value options override the
config.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.measure import Spread, environment, markdown, parser, publish
from forge.config import load_config
from forge.runtime.errors import FAILED, UserError
from scripts.options import exit_code_of, positive

ROOT = Path(__file__).resolve().parent.parent
RECIPES: dict[str, tuple[str, ...]] = {
    "adamw": (),
    "muon": ("--optimizer.name=muon",),
    "muon, polar express, neuron": (
        "--optimizer.name=muon",
        "--optimizer.muon.orthogonalization=polar_express",
        "--optimizer.muon.second_moment=neuron",
    ),
    "lion": ("--optimizer.name=lion", "--optimizer.betas=[0.9,0.99]"),
}
SMOOTHED = 10  # steps
# Factor of the learning rates for Lion, as recommended by Lion's authors.
SMALLER = {"lion": 0.2}
Run = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: measure(given, overrides))


def measure(given: argparse.Namespace, overrides: list[str]) -> None:
    """Train with all optimizers; print and write the table; draw the curves."""
    about = environment(torch.device("cpu"))
    about["settings"] = settings_of_runs(given, overrides) | {"seeds": given.seeds}
    results = {name: _tune(name, given, overrides) for name in given.only}
    publish("recipes", given.output, about, results, _table(results))
    _draw(results, given.output / f"{about['date']}-recipes")


def _draw(results: dict[str, dict[str, list[Run]]], stem: Path) -> None:
    """Draw the training losses of the best runs, smoothed over SMOOTHED steps, by steps and by time."""
    from forge.tools.report.draw import Curve, curves  # needs matplotlib

    by_step, by_time = list[Curve](), list[Curve]()
    for color, (name, runs) in enumerate(results.items()):
        losses, step_s = runs["best"][0]["losses"], statistics.median(runs["best"][0]["step_times"])
        wide = min(SMOOTHED, len(losses))
        steps = list(range(wide, len(losses) + 1))
        means = [sum(losses[step - wide : step]) / wide for step in steps]
        by_step.append(Curve(name, (steps, means), color))
        by_time.append(Curve(name, ([round(step_s * step, 2) for step in steps], means), color))
    unit = f"nats per token, mean of {SMOOTHED} steps"
    for suffix, drawn, x in (("steps", by_step, "optimizer step"), ("time", by_time, "seconds in steps")):
        drawing = curves("loss", drawn, unit, size=(7.2, 3.6), x=x)
        stem.with_name(f"{stem.name}-{suffix}.svg").write_text(drawing)


def settings_of_runs(given: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Return the settings common to all runs. Raises UserError for an invalid config or a config without held-out data."""
    config = load_config(["--config", given.config, *overrides])
    if not config.data.validation:
        raise UserError("data.validation is empty, but held-out loss decides; name held-out data")
    return {
        "config": Path(given.config).stem,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "steps": given.steps,
        "global_batch_size": config.train.global_batch_size,
        "seq_len": config.train.seq_len,
    }


def _tune(name: str, given: argparse.Namespace, overrides: list[str]) -> dict[str, list[Run]]:
    """Return the runs of one optimizer: one for each learning rate, and one for each seed with the best rate."""

    def trained(lr: float, seed: int) -> Run:
        options = [*overrides, f"--run.seed={seed}", f"--optimizer.lr={lr}", *RECIPES[name]]
        return {"lr": lr, "seed": seed} | train(f"{name} at {lr:g}", given.config, given.steps, options)

    tried = [trained(rate * SMALLER.get(name, 1.0), 0) for rate in given.rates]
    best = min(tried, key=lambda run: run["held_out"])
    return {"tried": tried, "best": [best, *(trained(best["lr"], seed) for seed in range(1, given.seeds))]}


def train(what: str, config: str, steps: int, options: list[str]) -> Run:
    """Run train.py. Return the final held-out loss, all losses and seconds of steps. Raises UserError if the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        own = [
            f"--run.output_dir={folder}",
            "--run.name=run",
            f"--train.steps={steps}",
            f"--evaluate.interval={steps}",
            "--evaluate.sample_interval=0",
            "--checkpoint.interval=0",
            "--metrics.log_interval=1",
            "--metrics.tensorboard=false",
        ]
        command = [sys.executable, str(ROOT / "train.py"), "--config", config, *options, *own]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
            raise UserError(f"{what}: train.py ended with {done.returncode}:\n{last}", FAILED)
        lines = list(map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()))
    ran = [line for line in lines if "loss" in line]
    held_out = [loss for line in lines for loss in line.get("eval", {}).values()]
    # null: a loss of NaN or infinity.
    found = {
        "held_out": sum(held_out) / len(held_out) if held_out and None not in held_out else float("inf"),
        "seconds": sum(line["step_time_s"] for line in ran),
        "losses": [round(line["loss"] or float("inf"), 4) for line in ran],
        "step_times": [round(line["step_time_s"], 4) for line in ran],
    }
    print(f"{what}: {found['held_out']:.3f} in {found['seconds']:.0f} s", file=sys.stderr)
    return found


def _table(results: dict[str, dict[str, list[Run]]]) -> str:
    head = [
        "recipe",
        "held-out loss at each learning rate",
        "best",
        "its loss over seeds",
        "seconds of a step, median",
    ]
    rows = []
    for name, runs in results.items():
        tried = ", ".join(f"{run['lr']:g}: {run['held_out']:.3f}" for run in runs["tried"])
        losses = Spread.of([run["held_out"] for run in runs["best"]])
        step_s = statistics.median(time for run in runs["best"] for time in run["step_times"])
        best = runs["best"][0]["lr"]
        rates = [run["lr"] for run in runs["tried"]]
        shown = f"{best:g}"
        if len(rates) > 1 and best in (min(rates), max(rates)):
            shown += f" (of those tried the {'lowest' if best == min(rates) else 'highest'})"
        rows.append([name, tried, shown, losses.show(3), f"{step_s:.3f}"])
    return f"{markdown(head, rows)}\n\nMedians over seeds (lowest to highest). The first seed chose the learning rate."


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, config="config to train", tiny=False)
    add = made.add_argument
    add("--steps", type=positive, default=300, metavar="N", help="steps of a run (%(default)s)")
    add("--seeds", type=positive, default=3, metavar="N", help="runs at the best rate (%(default)s)")
    add("--only", nargs="+", default=list(RECIPES), choices=RECIPES, metavar="NAME", help="recipes (all)")
    add(
        "--rates",
        type=float,
        nargs="+",
        default=[1e-3, 3e-3, 1e-2],
        metavar="LR",
        help="learning rates of each (1e-3 3e-3 1e-2)",
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
