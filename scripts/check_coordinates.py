#!/usr/bin/env python
"""Train a few steps of one recipe at several widths, and draw the change of each activation by width.

    python scripts/check_coordinates.py --config debug --optimizer.parametrization=mup --optimizer.mup.base_dim=64

If learning rates transfer between widths, the curves are flat. The exit code does not depend on the slopes, so look at the
drawing. Needs the extra forge[report].
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from forge.config import load_config
from forge.tools.sweep.coordinates import check_widths, growth
from scripts import images
from scripts.options import Options, exit_code_of, local_path, positive, require_output


def main(arguments: list[str] | None = None) -> int:
    """Train, draw and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add("--config", required=True, help="the recipe, a file or a name in configs/; overrides may follow")
    add(
        "--widths",
        type=_widths,
        default="64,128,256,512",
        help="values of model.dim; other sizes grow in proportion (%(default)s)",
    )
    add(
        "--steps",
        type=positive,
        default=4,
        help="compare activations before and after this number of optimizer steps (%(default)s)",
    )
    add("--output", type=local_path, default=Path("coordinates.svg"), help="image to write (%(default)s)")
    given, overrides = parser.parse_known_args(arguments)
    return exit_code_of(lambda: _run(given, overrides))


def _widths(text: str) -> list[int]:
    try:
        return [positive(width) for width in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be whole numbers with commas between them, not {text}"
        ) from None


def _run(given: argparse.Namespace, overrides: list[str]) -> None:
    import_module("forge.tools.report.draw")  # report a missing matplotlib before training

    require_output(given.output)
    config = load_config(["--config", given.config, *overrides])
    widths = given.widths
    with torch.random.fork_rng():
        found = check_widths(config, widths, given.steps, lambda width: print(f"width {width}", flush=True))
    print(f"{'change of':16} {'slope':>6}  " + "".join(f"{width:>10}" for width in widths))
    for name, sizes in found.items():
        print(f"{name:16} {growth(sizes):6.2f}  " + "".join(f"{size:10.4f}" for size in sizes.values()))
    code = images.write(given.output, lambda: draw(found, config.optimizer.parametrization))
    if code:
        raise SystemExit(code)


def draw(found: dict[str, dict[int, float]], name: str) -> str:
    """Draw the changes by width as SVG, with two logarithmic axes. found: activation -> width -> change. name: title."""
    from forge.tools.report.draw import Curve, curves  # needs matplotlib

    drawn = [
        Curve(activation, (list(map(float, sizes)), list(sizes.values())), number)
        for number, (activation, sizes) in enumerate(found.items())
    ]
    x = f"model.dim; parametrization {name}"
    return curves("coordinates", drawn, "change, rms", size=(7.2, 3.6), log=True, log_x=True, x=x)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
