#!/usr/bin/env python
"""Draw a plan as SVG images: memory over one step, and of a pipeline its timeline.

python train.py --config 7b --plan --world-size 64 --hardware h100 --json > plan.json
python scripts/plot_plan.py --plan plan.json --output drawings

Writes memory.svg, of the rank that needs most: at each part of a step the most bytes that live there, in any of its
microbatches, by kind. Of a pipeline also pipeline.svg: what each rank does when.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.observe.hardware import GIB
from forge.parallel.pipeline.schedule import Action, TimedAction, idle_share
from forge.runtime.errors import FINISHED
from scripts import svg
from scripts.options import Options
from scripts.plot_pipeline import draw_timeline

WIDTH, HEIGHT, LEFT, TOP = 900, 320, 64, 56
# From the bottom up.
KINDS = ("state", "gradients", "gathered", "activations", "masks", "loss")


def main(argv: list[str]) -> int:
    """Draw and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add("--plan", type=Path, required=True, help="what train.py --plan --json printed")
    add("--output", type=Path, default=Path(), help="folder for the images (default: this one)")
    given = parser.parse_args(argv)
    given.output.mkdir(parents=True, exist_ok=True)
    code = svg.write(given.output / "memory.svg", lambda: draw_memory(_read(given.plan)))
    if code == FINISHED and _read(given.plan)["timeline"] is not None:
        code = svg.write(given.output / "pipeline.svg", lambda: draw_pipeline(_read(given.plan)))
    return code


def _read(path: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if "stages" not in plan:
        raise ValueError(f"{path}: not a plan; write one with train.py --plan --json")
    return plan


def draw_pipeline(plan: dict[str, Any]) -> str:
    """Draw the timeline; times are in seconds where the plan has hardware."""
    timeline = [
        [TimedAction(_action(name), start, stop) for name, start, stop in of_rank]
        for of_rank in plan["timeline"]
    ]
    end = max(slot.stop for of_rank in timeline for slot in of_rank)
    length = f"{end:.3g} s" if plan["time"] else "without hardware, a backward takes two forwards"
    return draw_timeline(timeline, f"one step: {length}; idle {idle_share(timeline):.1%}")


def _action(name: str) -> Action:
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", name)
    assert match is not None, name
    return Action(int(match[1]), match[2], int(match[3]))


def draw_memory(plan: dict[str, Any]) -> str:
    """Draw the stage that needs most, as areas one on another."""
    stage = max(plan["stages"], key=lambda stage: stage["memory"]["peak"])
    peaks = [peak for peak in stage["peaks"] if peak["phase"] != "begin"]
    places = _places(peaks)
    most = max(sum(peak["bytes"].values()) for peak in peaks)
    step = (WIDTH - LEFT) / max(1, max(places) - min(places))
    across = [LEFT + step * (place - min(places)) for place in places]

    def y(size: float) -> float:
        return TOP + HEIGHT * (1 - size / most)

    title = f"memory of rank {stage['rank']} over one step: at most {most / GIB:.2f} GiB in the {stage['peak']['at']}"
    parts = [svg.label(LEFT, 16, title)]
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(svg.label(LEFT - 8, y(share * most) + 4, f"{share * most / GIB:.2f}", "end"))
    below = [0.0] * len(peaks)
    for number, kind in enumerate(KINDS):
        above = [size + peak["bytes"].get(kind, 0) for size, peak in zip(below, peaks, strict=True)]
        corners = [*zip(across, above, strict=True), *reversed([*zip(across, below, strict=True)])]
        points = " ".join(f"{x:.1f},{y(size):.1f}" for x, size in corners)
        parts.append(svg.element("polygon", points=points, fill=svg.COLORS[number], fill_opacity="0.6"))
        parts.append(
            svg.element("rect", x=LEFT + 130 * number, y=26, width=12, height=12, fill=svg.COLORS[number])
        )
        parts.append(svg.label(LEFT + 130 * number + 18, 36, kind))
        below = above
    for first, x in _first_of_each(peaks, across):
        parts.append(svg.element("path", d=f"M{x:.1f} {TOP}V{TOP + HEIGHT + 6}", stroke="#888"))
        parts.append(svg.label(x + 3, TOP + HEIGHT + 18, first))
    return svg.document(WIDTH + 8, TOP + HEIGHT + 28, parts)


def _places(peaks: Sequence[dict[str, Any]]) -> list[float]:
    """Where each peak lies: parts of the model one after another, layers by their numbers, also where some are left out."""
    places: list[float] = []
    previous: int | None = None
    for peak in peaks:
        match = re.fullmatch(r"layers\.(\d+)", peak["part"])
        layer = int(match[1]) if match else None
        apart = 1 if layer is None or previous is None else max(1, abs(layer - previous))
        places.append(places[-1] + apart if places else 0.0)
        previous = layer
    return places


def _first_of_each(peaks: Sequence[dict[str, Any]], across: Sequence[float]) -> list[tuple[str, float]]:
    found: dict[str, float] = {}
    for peak, x in zip(peaks, across, strict=True):
        found.setdefault(peak["phase"], x)
    return list(found.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
