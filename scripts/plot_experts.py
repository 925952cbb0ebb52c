#!/usr/bin/env python
"""Draw the load of the experts during a run as an SVG image: `python scripts/plot_experts.py RUN_DIRECTORY`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.errors import UserError
from forge.observe.router_load import colors
from scripts import svg

CHART = 260


def main(argv: list[str]) -> int:
    """Draw and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("run", type=Path, help="the run's directory, which holds metrics.jsonl")
    add("--output", type=Path, default=Path("experts.svg"), help="image to write (default: experts.svg)")
    add("--mark", type=float, default=1.5, help="load to mark by a horizontal line (default: 1.5)")
    given = parser.parse_args(argv)
    return svg.write(given.output, lambda: draw(read_routers(given.run / "metrics.jsonl"), given.mark))


def read_routers(path: Path) -> list[dict[str, Any]]:
    """Return the metrics lines that have `routers`."""
    lines = [line for line in svg.read_lines(path) if "routers" in line]
    if not lines:
        raise UserError(f"{path} has no lines about experts")
    return lines


def draw(lines: list[dict[str, Any]], mark: float) -> str:
    """Draw metrics lines with `routers` as SVG: the largest load of each layer by step, below it maps of all loads."""
    highest = max(1.1, mark, *(layer["load_max"] for line in lines for layer in line["routers"].values()))
    title = "most visited expert of each layer, in even shares"
    chart = svg.Chart(title, lines[-1]["step"], 1, highest, CHART)
    chart.mark(mark, f"{mark:g}")
    layers = lines[0]["routers"]
    for layer in layers:
        chart.curve(f"layer {layer}", [(line["step"], line["routers"][layer]["load_max"]) for line in lines])
    below = svg.TOP + CHART + 64
    maps = [line for line in lines if all("counts" in layer for layer in line["routers"].values())]
    chosen = [maps[i * (len(maps) - 1) // 3] for i in range(4)] if len(maps) >= 4 else maps
    room = (svg.WIDTH - svg.LEFT - svg.RIGHT) / max(len(chosen), 1)
    parts = chart.parts
    for number, line in enumerate(chosen):
        parts += _map(line, svg.LEFT + number * room, below, room - 24)
    height = below + (20 * len(layers) + 30 if chosen else 0)
    ground = svg.element("rect", width=svg.WIDTH, height=height, fill="white")
    return svg.document(svg.WIDTH, height, [ground, *parts])


def _map(line: dict[str, Any], left: float, top: int, width: float) -> list[str]:
    """Draw a row of cells for each layer, coloured by the load of each expert."""
    parts = [svg.label(left, top - 8, f"step {line['step']}")]
    for row, cells in enumerate(colors([layer["counts"] for layer in line["routers"].values()]).tolist()):
        size = width / len(cells)
        for column, cell in enumerate(cells):
            place: dict[str, Any] = {
                "x": left + column * size,
                "y": top + 20 * row,
                "width": size,
                "height": 20,
            }
            fill = f"rgb{tuple(cell)}"
            parts.append(svg.element("rect", **place, fill=fill, stroke="#ccc", stroke_width=0.5))
    return parts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
