#!/usr/bin/env python
"""Draw the loss curves of a run as an SVG image: `python scripts/plot_loss.py RUN_DIRECTORY --output loss.svg`."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.errors import UserError
from scripts import svg

HEIGHT = 360


def main(argv: list[str]) -> int:
    """Draw and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("run", type=Path, help="the run's directory, which holds metrics.jsonl")
    add("--output", type=Path, default=Path("loss.svg"), help="image to write (default: loss.svg)")
    add(
        "--mark",
        type=_mark,
        action="append",
        default=[],
        metavar="NAME=LOSS",
        help="loss to mark by a horizontal line",
    )
    given = parser.parse_args(argv)
    return svg.write(given.output, lambda: draw(read_curves(given.run / "metrics.jsonl"), given.mark))


def read_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Return name -> (step, loss) of the training loss and of every held-out source."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for fields in svg.read_lines(path):
        losses = {"training": fields.get("loss")}
        losses |= {f"held out: {name}": loss for name, loss in fields.get("eval", {}).items()}
        for name, loss in losses.items():
            if loss is not None:
                curves.setdefault(name, []).append((fields["step"], loss))
    if not curves:
        raise UserError(f"{path} has no loss yet")
    return curves


def _mark(text: str) -> tuple[str, float]:
    name, _, loss = text.rpartition("=")
    try:
        return name, float(loss)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must have the form NAME=LOSS, such as unigrams=7.2"
        ) from None


def draw(
    curves: dict[str, list[tuple[int, float]]], marks: list[tuple[str, float]], below: str = "optimizer step"
) -> str:
    """Draw the curves over what `below` names, and `marks` (name, loss) as dashed lines, as SVG."""
    losses = [loss for curve in curves.values() for _, loss in curve] + [loss for _, loss in marks]
    low, last = math.floor(min(losses)), max(step for curve in curves.values() for step, _ in curve)
    high = max(low + 1, math.ceil(max(losses)))
    chart = svg.Chart("loss, nats per token", last, low, high, HEIGHT - svg.TOP - 40)
    for name, loss in marks:
        chart.mark(loss, name)
    for name, curve in curves.items():
        chart.curve(name, curve)
    ground = svg.element("rect", width=svg.WIDTH, height=HEIGHT, fill="white")
    axis = svg.label(svg.WIDTH / 2, HEIGHT - 6, below, "middle")
    return svg.document(svg.WIDTH, HEIGHT, [ground, *chart.parts, axis])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
