#!/usr/bin/env python
"""Draw how the load of experts evens out in a run, as an SVG picture: `python scripts/plot_experts.py RUN_DIRECTORY`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.errors import BAD_CONFIG, FINISHED, UserError
from forge.observe.router_load import colors

WIDTH, LEFT, RIGHT, TOP, CHART = 720, 56, 16, 24, 260
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")


def main(argv: list[str]) -> int:
    """Draw and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's directory, which holds metrics.jsonl")
    parser.add_argument(
        "--output", type=Path, default=Path("experts.svg"), help="the picture (default: experts.svg)"
    )
    parser.add_argument("--mark", type=float, default=1.5, help="a horizontal line (default: 1.5)")
    arguments = parser.parse_args(argv)
    try:
        lines = [json.loads(line) for line in (arguments.run / "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if "routers" in line]
        if not lines:
            raise UserError(f"{arguments.run / 'metrics.jsonl'} tells of no experts")
        arguments.output.write_text(draw(lines, arguments.mark))
    except (UserError, OSError, ValueError) as error:
        print(f"forge: {error}", file=sys.stderr)
        return BAD_CONFIG
    return FINISHED


def draw(lines: list[dict[str, Any]], mark: float) -> str:
    """Metrics lines with `routers` -> one SVG text: the largest load of each layer by step, below it maps of all loads."""
    parts, below = _curves(lines, mark), TOP + CHART + 64
    maps = [line for line in lines if all("counts" in layer for layer in line["routers"].values())]
    chosen = [maps[i * (len(maps) - 1) // 3] for i in range(4)] if len(maps) >= 4 else maps
    layers = len(lines[0]["routers"])
    room = (WIDTH - LEFT - RIGHT) / max(len(chosen), 1)
    for number, line in enumerate(chosen):
        parts += _map(line, LEFT + number * room, below, room - 24)
    height = below + (20 * layers + 30 if chosen else 0)
    body = "\n".join([f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13" fill="#333">\n{body}\n</svg>\n'
    )


def _curves(lines: list[dict[str, Any]], mark: float) -> list[str]:
    last = lines[-1]["step"]
    highest = max(mark, *(layer["load_max"] for line in lines for layer in line["routers"].values()))

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(load: float) -> float:
        return TOP + CHART * (1 - (load - 1) / (highest - 1))

    parts = [f'<text x="{LEFT}" y="14">most visited expert of each layer, in even shares</text>']
    for load in range(1, int(highest) + 1):
        parts.append(f'<path d="M{LEFT} {y(load):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(load) + 4:.1f}" text-anchor="end">{load}</text>')
    for part in range(5):
        step = round(last * part / 4)
        parts.append(f'<text x="{x(step):.1f}" y="{TOP + CHART + 18}" text-anchor="middle">{step}</text>')
    parts.append(
        f'<path d="M{LEFT} {y(mark):.1f}H{WIDTH - RIGHT}" stroke="#888" stroke-dasharray="6 4"/>'
        f'<text x="{LEFT - 8}" y="{y(mark) + 4:.1f}" text-anchor="end" fill="#666">{mark:g}</text>'
    )
    for number, layer in enumerate(lines[0]["routers"]):
        color = COLORS[number % len(COLORS)]
        points = " ".join(
            f"{x(line['step']):.1f},{y(line['routers'][layer]['load_max']):.1f}" for line in lines
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT - 8}" y="{TOP + 18 * (number + 1)}" text-anchor="end" fill="{color}">'
            f"layer {layer}</text>"
        )
    return parts


def _map(line: dict[str, Any], left: float, top: float, width: float) -> list[str]:
    layers = line["routers"]
    parts = [f'<text x="{left:.1f}" y="{top - 8}">step {line["step"]}</text>']
    for row, cells in enumerate(colors([layer["counts"] for layer in layers.values()]).tolist()):
        size = width / len(cells)
        parts += [
            f'<rect x="{left + column * size:.1f}" y="{top + 20 * row}" width="{size:.1f}" height="20" '
            f'fill="rgb{tuple(cell)}" stroke="#ccc" stroke-width="0.5"/>'
            for column, cell in enumerate(cells)
        ]
    return parts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
