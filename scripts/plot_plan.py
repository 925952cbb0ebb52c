#!/usr/bin/env python
"""Draw a plan as SVG images: memory over one step and, with a pipeline, the timeline of a step.

    python train.py --config 7b --plan --world-size 64 --hardware h100 --json > plan.json
    python scripts/plot_plan.py --plan plan.json --output drawings

Writes memory.svg for the rank with the highest peak. The image shows live memory by kind and part of a step, as the maximum
over all microbatches. With a pipeline, also writes pipeline.svg, the actions of each rank over time. Needs the extra
forge[report].
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.observe.hardware import GIB
from forge.parallel.pipeline.schedule import Action, TimedAction, idle_share
from forge.runtime.errors import FINISHED, UserError, unreadable
from forge.runtime.files import read_json
from scripts import images
from scripts.options import Options, local_path
from scripts.plot_pipeline import draw_timeline

# Kinds of memory, in the order of the stacked areas from bottom to top.
KINDS = ("state", "gradients", "gathered", "activations", "masks", "loss")


def main(argv: list[str]) -> int:
    """Draw and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add("--plan", type=Path, required=True, help="output of train.py --plan --json")
    add(
        "--output",
        type=local_path,
        default=Path(),
        help="folder for the images (default: the current folder)",
    )
    given = parser.parse_args(argv)
    try:
        given.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {given.output}: {error.strerror}")
    code = images.write(given.output / "memory.svg", lambda: _drawn(given.plan, draw_memory))
    if code == FINISHED and _read(given.plan).get("timeline") is not None:
        code = images.write(given.output / "pipeline.svg", lambda: _drawn(given.plan, draw_pipeline))
    return code


def _drawn(path: Path, draw: Callable[[dict[str, Any]], str]) -> str:
    try:
        return draw(_read(path))
    except OSError as error:
        raise unreadable(f"--plan {path}", error) from None
    except (KeyError, TypeError, ValueError) as error:
        message = f"--plan {path}: is not a plan; write one with train.py --plan --json"
        raise UserError(message) from error


def _read(path: Path) -> Any:
    return read_json(path.read_bytes())


def draw_pipeline(plan: dict[str, Any]) -> str:
    """Draw the pipeline's timeline as SVG. Times are in seconds if the plan has hardware, else in units of a forward."""
    timeline = [
        [TimedAction(_action(name), start, stop) for name, start, stop in of_rank]
        for of_rank in plan["timeline"]
    ]
    end = max(slot.stop for of_rank in timeline for slot in of_rank)
    length = (
        f"{end:.3g} s" if plan["time"] else "without --hardware, a backward is drawn as long as two forwards"
    )
    return draw_timeline(timeline, f"one step: {length}; idle {idle_share(timeline):.1%}")


def _action(name: str) -> Action:
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", name)
    assert match is not None, name
    return Action(int(match[1]), match[2], int(match[3]))


def draw_memory(plan: dict[str, Any]) -> str:
    """Draw the memory of the stage with the highest peak as SVG: stacked areas by kind, in GiB."""
    from forge.tools.report.draw import COLORS, STYLE, as_svg, matplotlib, new_figure  # needs matplotlib

    stage = max(plan["stages"], key=lambda stage: stage["memory"]["peak"])
    peaks = [peak for peak in stage["peaks"] if peak["phase"] != "begin"]
    places = _places(peaks)
    sizes = [[peak["bytes"].get(kind, 0) / GIB for peak in peaks] for kind in KINDS]
    most = max(map(sum, zip(*sizes, strict=True)))
    title = (
        f"memory of rank {stage['rank']} over one step: at most {most:.2f} GiB in the {stage['peak']['at']}"
    )
    with matplotlib.rc_context(STYLE):
        figure = new_figure(10.4, 3.6, top=0.3)
        axes = figure.add_subplot(xlim=(min(places), max(places)), ylabel="GiB")
        axes.stackplot(places, sizes, labels=KINDS, colors=COLORS, alpha=0.6)
        first = {peak["phase"]: place for peak, place in reversed([*zip(peaks, places, strict=True)])}
        axes.set_xticks(list(first.values()), list(first), ha="left")
        axes.set_title(title, loc="left")
        axes.legend(loc="upper left", ncols=len(KINDS))
        return as_svg(figure, "memory")


def _places(peaks: Sequence[dict[str, Any]]) -> list[float]:
    """Return the horizontal position of each peak.

    Neighbouring peaks are 1 apart. If both are layers, they are as far apart as the layers' numbers, but at least 1.
    """
    places: list[float] = []
    previous: int | None = None
    for peak in peaks:
        match = re.fullmatch(r"layers\.(\d+)", peak["part"])
        layer = int(match[1]) if match else None
        apart = 1 if layer is None or previous is None else max(1, abs(layer - previous))
        places.append(places[-1] + apart if places else 0.0)
        previous = layer
    return places


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
