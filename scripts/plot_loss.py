#!/usr/bin/env python
"""Draw the loss curves of one or several runs as an SVG image: `python scripts/plot_loss.py RUN [RUN ...]`.

Needs the extra forge[report].
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.runtime.errors import UserError
from forge.tools.report.read import read_runs
from scripts import images
from scripts.options import Options, local_path


def main(argv: list[str]) -> int:
    """Draw and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="a run's directory, which holds metrics.jsonl")
    add("--output", type=local_path, default=Path("loss.svg"), help="image to write (default: loss.svg)")
    add(
        "--mark",
        type=_mark,
        action="append",
        default=[],
        metavar="NAME=LOSS",
        help="loss to mark by a horizontal line",
    )
    given = parser.parse_args(argv)
    return images.write(given.output, lambda: draw(given.runs, given.mark))


def _mark(text: str) -> tuple[str, float]:
    name, _, loss = text.rpartition("=")
    try:
        return name, float(loss)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must have the form NAME=LOSS, such as unigrams=7.2"
        ) from None


def draw(paths: list[Path], marks: list[tuple[str, float]]) -> str:
    """Draw the losses of the runs in `paths` as SVG. marks: (name, loss) of dashed lines. Raises UserError without losses."""
    from forge.tools.report.course import loss_curves  # needs matplotlib
    from forge.tools.report.draw import curves

    drawn = [curve for curve in loss_curves(read_runs(paths)) if curve.points[0]]
    if not drawn:
        raise UserError(f"{', '.join(map(str, paths))}: no loss yet")
    return curves("loss", drawn, "nats per token", size=(7.2, 3.6), x="optimizer step", levels=marks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
