#!/usr/bin/env python
"""Draw the loss curves of a run as an SVG picture: `python scripts/plot_loss.py RUN_DIRECTORY --output loss.svg`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.errors import BAD_CONFIG, FINISHED, UserError

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 360, 56, 40, 24, 16


def main(argv: list[str]) -> int:
    """Draw and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's directory, which holds metrics.jsonl")
    parser.add_argument(
        "--output", type=Path, default=Path("loss.svg"), help="the picture (default: loss.svg)"
    )
    parser.add_argument("--mark", action="append", default=[], metavar="NAME=LOSS", help="a horizontal line")
    arguments = parser.parse_args(argv)
    try:
        marks = {name: float(value) for name, _, value in (mark.partition("=") for mark in arguments.mark)}
        arguments.output.write_text(draw(read_curves(arguments.run / "metrics.jsonl"), marks))
    except (UserError, OSError, ValueError) as error:
        print(f"forge: {error}", file=sys.stderr)
        return BAD_CONFIG
    return FINISHED


def read_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Name -> (step, loss) of the training loss and of every held-out source."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        losses = {"training": fields.get("loss")} | {
            f"held out: {k}": v for k, v in fields.get("eval", {}).items()
        }
        for name, loss in losses.items():
            if loss is not None:
                curves.setdefault(name, []).append((fields["step"], loss))
    if not curves:
        raise UserError(f"{path} holds no loss yet")
    return curves


def draw(curves: dict[str, list[tuple[int, float]]], marks: dict[str, float]) -> str:
    """The curves, and `marks` as dashed lines, in one SVG text."""
    steps = [step for curve in curves.values() for step, _ in curve]
    losses = [loss for curve in curves.values() for _, loss in curve] + list(marks.values())
    low, high, last = math.floor(min(losses)), math.ceil(max(losses)), max(steps)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(loss: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (loss - low) / (high - low)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for loss in range(low, high + 1):
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for part in range(5):
        step = round(last * part / 4)
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">optimizer step</text>')
    parts.append(f'<text x="{LEFT}" y="14">loss, nats per token</text>')
    for name, mark in marks.items():
        parts.append(
            f'<path d="M{LEFT} {y(mark):.1f}H{WIDTH - RIGHT}" stroke="#888" stroke-dasharray="6 4"/>'
        )
        parts.append(
            f'<text x="{WIDTH - RIGHT}" y="{y(mark) - 5:.1f}" text-anchor="end" fill="#666">{name}</text>'
        )
    for number, (name, curve) in enumerate(curves.items()):
        color = ("#2563eb", "#dc2626", "#059669", "#d97706")[number % 4]
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        if len(curve) < 20:
            parts += [f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="3.5" fill="{color}"/>' for s, v in curve]
        label_y = TOP + 18 + 18 * number
        parts.append(
            f'<text x="{WIDTH - RIGHT - 8}" y="{label_y}" text-anchor="end" fill="{color}">{name}</text>'
        )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13" fill="#333">\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
