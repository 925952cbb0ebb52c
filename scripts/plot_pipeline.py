#!/usr/bin/env python
"""Draw the timeline of a pipeline schedule, with the work of each rank, as an SVG image.

python scripts/plot_pipeline.py --schedule ZBVZeroBubble --ranks 4 --microbatches 8 --output timeline.svg
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.config.pipeline import ONE_PER_RANK
from forge.parallel.pipeline.schedule import Schedule, TimedAction, make_schedule, read_schedule
from scripts import svg
from scripts.options import Options, positive

LEFT, TOP, ROW, GAP, WIDTH = 64, 40, 26, 8, 1000
COLORS = {"F": "#93c5fd", "B": "#86efac", "I": "#bbf7d0", "W": "#fcd34d"}
NAMES = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}


def main(argv: list[str]) -> int:
    """Draw and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add("--schedule", required=True, help="a value of pipeline.schedule: a name, or a CSV file")
    add("--ranks", type=positive, default=4, help="parallel.pp (default: 4)")
    add("--microbatches", type=positive, default=8, help="microbatches per optimizer step (default: 8)")
    add("--stages-per-rank", type=positive, default=2, help="for looped schedules (default: 2)")
    add(
        "--whole-backward",
        action="store_true",
        help="do not split backward passes, as with recomputation or compilation",
    )
    add("--output", type=Path, default=Path("pipeline.svg"), help="image to write (default: pipeline.svg)")
    given = parser.parse_args(argv)
    return svg.write(given.output, lambda: _picture(given))


def _picture(given: argparse.Namespace) -> str:
    schedule = _schedule(given)
    schedule = schedule.unsplit() if given.whole_backward else schedule
    print(f"{given.output}: idle {schedule.bubble:.1%} of the time")
    return draw(schedule, given.schedule)


def _schedule(chosen: argparse.Namespace) -> Schedule:
    if chosen.schedule.endswith(".csv"):
        return read_schedule(Path(chosen.schedule), chosen.ranks, chosen.microbatches)
    per_rank = 1 if chosen.schedule in ONE_PER_RANK else chosen.stages_per_rank
    return make_schedule(chosen.schedule, chosen.ranks, chosen.ranks * per_rank, chosen.microbatches)


def draw(schedule: Schedule, title: str) -> str:
    """Draw one row per stage, grouped by rank, with time from left to right in units of a forward pass."""
    return draw_timeline(
        schedule.timeline,
        f"{Path(title).name}: {schedule.microbatches} microbatches; idle {schedule.bubble:.1%}",
    )


def draw_timeline(timeline: Sequence[Sequence[TimedAction]], title: str) -> str:
    """Draw what each rank does when: one row per stage, grouped by rank, with time from left to right."""
    own_stages = [sorted({slot.action.stage for slot in slots}) for slots in timeline]
    facts = f"{len(timeline)} ranks, {sum(map(len, own_stages))} stages"
    unit = (WIDTH - LEFT) / max(slot.stop for slots in timeline for slot in slots)
    parts = [svg.label(LEFT, 16, f"{title}; {facts}")]
    rows, y = {}, TOP
    for rank, own in enumerate(own_stages):
        height = ROW * len(own)
        parts.append(svg.element("rect", x=LEFT, y=y, width=WIDTH - LEFT, height=height, fill="#f3f4f6"))
        parts.append(svg.label(4, y + height // 2 + 4, f"rank {rank}"))
        for stage in own:
            rows[stage] = y
            parts.append(svg.label(LEFT - 6, y + 17, stage, "end", fill="#888"))
            y += ROW
        y += GAP
    for slots in timeline:
        for (stage, kind, microbatch), start, stop in slots:
            x, width = LEFT + unit * start, unit * (stop - start)
            name, look = (
                f"<title>{stage}{kind}{microbatch}</title>",
                {"fill": COLORS[kind], "stroke": "white"},
            )
            parts.append(
                svg.element("rect", name, x=x, y=rows[stage] + 1, width=width, height=ROW - 2, **look)
            )
            if width > 12:
                parts.append(svg.label(x + width / 2, rows[stage] + 17, microbatch, "middle"))
    kinds = {slot.action.kind for slots in timeline for slot in slots}
    for place, kind in enumerate(sorted(kinds, key="FBIW".index)):
        x = LEFT + 150 * place
        parts.append(svg.element("rect", x=x, y=y, width=14, height=14, fill=COLORS[kind]))
        parts.append(svg.label(x + 20, y + 12, NAMES[kind]))
    return svg.document(WIDTH + 8, y + 22, parts, font_size=12)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
