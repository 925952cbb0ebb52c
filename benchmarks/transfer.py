"""Best learning rates of narrow and wide models, under each parametrization.

    python benchmarks/transfer.py                          after `make data`; 40 minutes on two CPU cores
    python benchmarks/transfer.py --parametrizations mup --widths 64 128 --steps 50

Whole runs of train.py, one after another: the config's model at each width, with each learning rate. The first width is
the base width of the parametrization. Prints the held-out losses and, for each width, the grid distance between its best
learning rate and that of the first width. Writes everything, with date, versions and settings, to benchmarks/results/.
Other --section.key=value options override the config.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.measure import environment, markdown, parser, publish
from benchmarks.recipes import settings_of_runs, train
from forge.config import load_config, to_toml
from forge.tools.sweep.coordinates import of_width
from scripts.options import exit_code_of, positive

Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: measure(given, overrides))


def measure(given: argparse.Namespace, overrides: list[str]) -> None:
    """Train at all widths and rates; print and write the table."""
    about = environment(torch.device("cpu"))
    about["settings"] = settings_of_runs(given, overrides) | {"overrides": overrides}
    rows = [row for name in given.parametrizations for row in _widths(name, given, overrides)]
    publish("transfer", given.output, about, {"rows": rows}, _table(rows, given.rates))


def _widths(name: str, given: argparse.Namespace, overrides: list[str]) -> list[Row]:
    rows: list[Row] = []
    options = [f"--optimizer.parametrization={name}"]
    if name != "standard":
        options.append(f"--optimizer.mup.base_dim={given.widths[0]}")
    config = load_config(["--config", given.config, *overrides, *options])
    with tempfile.TemporaryDirectory() as folder:
        for width in given.widths:
            path = Path(folder) / f"{width}.toml"
            path.write_text(to_toml(of_width(config, width)))
            losses = [
                train(f"{name}, width {width}, {rate:g}", str(path), given.steps, [f"--optimizer.lr={rate}"])[
                    "held_out"
                ]
                for rate in given.rates
            ]
            rows.append(
                {
                    "parametrization": name,
                    "width": width,
                    "held_out": losses,
                    "best": min(range(len(losses)), key=losses.__getitem__),
                }
            )
            rows[-1]["moved"] = rows[-1]["best"] - rows[0]["best"]
    return rows


def _table(rows: list[Row], rates: list[float]) -> str:
    head = [
        "parametrization",
        "width",
        *(f"{rate:g}" for rate in rates),
        "places from the first width's best",
    ]
    lines = []
    for row in rows:
        shown = [f"{loss:.3f}" for loss in row["held_out"]]
        shown[row["best"]] = f"**{shown[row['best']]}**"
        lines.append([row["parametrization"], str(row["width"]), *shown, f"{row['moved']:+d}"])
    return f"{markdown(head, lines)}\n\nHeld-out loss by learning rate."


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, config="the model, whose sizes grow with its width", tiny=False)
    add = made.add_argument
    add("--steps", type=positive, default=150, metavar="N", help="steps of a run (%(default)s)")
    add("--widths", type=positive, nargs="+", default=[64, 256], metavar="N", help="model.dim (64 256)")
    add(
        "--parametrizations",
        nargs="+",
        default=["standard", "mup"],
        choices=["standard", "mup", "completep"],
        metavar="NAME",
        help="(standard mup)",
    )
    add(
        "--rates",
        type=float,
        nargs="+",
        default=[1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2],
        metavar="LR",
        help="learning rates of each, from low to high (1e-3 2e-3 ... 3.2e-2)",
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
