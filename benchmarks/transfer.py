"""Best learning rates of narrow, wide and deep models, under each parametrization.

    python benchmarks/transfer.py                          after `make data`; 40 minutes on two CPU cores
    python benchmarks/transfer.py --parametrizations completep --widths 64 256 --depths 4 16 --optimizer.name=muon

Makes whole runs of train.py, one after another. Trains the config's model with each learning rate, at each width with the
first depth, and at each depth with the first width. The first width and depth are the base sizes of the parametrization.
Prints the held-out losses and, for each size, the distance between its best learning rate and the best of the first size,
in places of the grid. Writes everything, with date, versions and settings, to benchmarks/results/. Other
--section.key=value options override the config.
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
    rows = [row for name in given.parametrizations for row in _sizes(name, given, overrides)]
    publish("transfer", given.output, about, {"rows": rows}, _table(rows, given.rates), timed=False)


def _sizes(name: str, given: argparse.Namespace, overrides: list[str]) -> list[Row]:
    rows: list[Row] = []
    shared = ["--config", given.config, *overrides]
    depths = given.depths or [load_config(shared).model.n_layers]
    options = [f"--model.n_layers={depths[0]}", f"--optimizer.parametrization={name}"]
    if name != "standard":
        options.append(f"--optimizer.mup.base_dim={given.widths[0]}")
    if name == "completep":
        options.append(f"--optimizer.mup.base_depth={depths[0]}")
    config = load_config([*shared, *options])
    sizes = [(width, depths[0]) for width in given.widths]
    sizes += [(given.widths[0], depth) for depth in depths[1:]]
    with tempfile.TemporaryDirectory() as folder:
        for width, depth in sizes:
            path = Path(folder) / f"{width}-{depth}.toml"
            path.write_text(to_toml(of_width(config, width)))
            losses = []
            for rate in given.rates:
                own = [f"--optimizer.lr={rate}", f"--model.n_layers={depth}"]
                what = f"{name}, width {width}, depth {depth}, {rate:g}"
                losses.append(train(what, str(path), given.steps, own)["held_out"])
            best = min(range(len(losses)), key=losses.__getitem__)
            rows.append(
                {"parametrization": name, "width": width, "depth": depth, "held_out": losses, "best": best}
            )
            rows[-1]["moved"] = rows[-1]["best"] - rows[0]["best"]
    return rows


def _table(rows: list[Row], rates: list[float]) -> str:
    head = [
        "parametrization",
        "width",
        "depth",
        *(f"{rate:g}" for rate in rates),
        "places from the first size's best",
    ]
    lines = []
    for row in rows:
        shown = [f"{loss:.3f}" for loss in row["held_out"]]
        shown[row["best"]] = f"**{shown[row['best']]}**"
        size = [str(row["width"]), str(row["depth"])]
        lines.append([row["parametrization"], *size, *shown, f"{row['moved']:+d}"])
    return f"{markdown(head, lines)}\n\nHeld-out loss by learning rate."


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, config="the model, whose sizes grow with its width", tiny=False)
    add = made.add_argument
    add("--steps", type=positive, default=150, metavar="N", help="steps of a run (%(default)s)")
    add("--widths", type=positive, nargs="+", default=[64, 256], metavar="N", help="model.dim (64 256)")
    add(
        "--depths",
        type=positive,
        nargs="+",
        default=[],
        metavar="N",
        help="model.n_layers (the config's alone)",
    )
    add(
        "--parametrizations",
        nargs="+",
        default=["standard", "mup"],
        choices=["standard", "mup", "completep"],
        metavar="NAME",
        help="parametrizations to compare (standard mup)",
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
