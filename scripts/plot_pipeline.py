#!/usr/bin/env python
"""Draw what each rank of a pipeline does when, as an SVG picture, from the schedule that a run would follow.

python scripts/plot_pipeline.py --schedule ZBVZeroBubble --ranks 4 --microbatches 8 --output timeline.svg
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.config.pipeline import ONE_PER_RANK
from forge.errors import BAD_CONFIG, FINISHED, UserError
from forge.parallel.pipeline.schedule import Schedule, make_schedule, read_schedule

LEFT, TOP, ROW, GAP, WIDTH = 64, 40, 26, 8, 1000
COLORS = {"F": "#93c5fd", "B": "#86efac", "I": "#bbf7d0", "W": "#fcd34d"}
NAMES = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}


def main(argv: list[str]) -> int:
    """Draw and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schedule", required=True, help="a value of pipeline.schedule: a name or a CSV file"
    )
    parser.add_argument("--ranks", type=int, default=4, help="parallel.pp (default: 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="per optimizer step (default: 8)")
    parser.add_argument("--stages-per-rank", type=int, default=2, help="of the looped schedules (default: 2)")
    parser.add_argument("--whole-backward", action="store_true", help="as with recomputation or compilation")
    parser.add_argument("--output", type=Path, default=Path("pipeline.svg"), help="(default: pipeline.svg)")
    chosen = parser.parse_args(argv)
    try:
        schedule = _schedule(chosen)
        schedule = schedule.unsplit() if chosen.whole_backward else schedule
        chosen.output.write_text(draw(schedule, chosen.schedule))
    except (UserError, OSError, ValueError, KeyError) as error:
        print(f"forge: {error}", file=sys.stderr)
        return BAD_CONFIG
    print(f"{chosen.output}: idle {schedule.bubble:.1%} of the time")
    return FINISHED


def _schedule(chosen: argparse.Namespace) -> Schedule:
    if chosen.schedule.endswith(".csv"):
        return read_schedule(Path(chosen.schedule), chosen.ranks, chosen.microbatches)
    per_rank = 1 if chosen.schedule in ONE_PER_RANK else chosen.stages_per_rank
    return make_schedule(chosen.schedule, chosen.ranks, chosen.ranks * per_rank, chosen.microbatches)


def draw(schedule: Schedule, title: str) -> str:
    """Stages down, those of a rank together; time across, in units of a forward."""
    end = max(slot.stop for slots in schedule.timeline for slot in slots)
    unit = (WIDTH - LEFT) / end
    rows, y = {}, TOP
    parts = []
    for rank in range(len(schedule.order)):
        own = [stage for stage, where in enumerate(schedule.rank_of) if where == rank]
        height = ROW * len(own)
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT}" height="{height}" fill="#f3f4f6"/>')
        parts.append(f'<text x="4" y="{y + height / 2 + 4:.0f}">rank {rank}</text>')
        for stage in own:
            rows[stage] = y
            parts.append(f'<text x="{LEFT - 6}" y="{y + 17}" text-anchor="end" fill="#888">{stage}</text>')
            y += ROW
        y += GAP
    for slots in schedule.timeline:
        for (stage, kind, microbatch), start, stop in slots:
            x, width = LEFT + unit * start, unit * (stop - start)
            parts.append(
                f'<rect x="{x:.1f}" y="{rows[stage] + 1}" width="{width:.1f}" height="{ROW - 2}" '
                f'fill="{COLORS[kind]}" stroke="white"><title>{stage}{kind}{microbatch}</title></rect>'
            )
            if width > 12:
                parts.append(
                    f'<text x="{x + width / 2:.1f}" y="{rows[stage] + 17}" text-anchor="middle">{microbatch}</text>'
                )
    parts.append(
        f'<text x="{LEFT}" y="16">{Path(title).name}: {len(schedule.order)} ranks, {len(schedule.rank_of)} stages, '
        f"{schedule.microbatches} microbatches; idle {schedule.bubble:.1%}</text>"
    )
    x = LEFT
    for kind in sorted({action.kind for order in schedule.order for action in order}, key="FBIW".index):
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{COLORS[kind]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}">{NAMES[kind]}</text>')
        x += 150
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 8} {y + 22}" font-family="sans-serif" '
        f'font-size="12" fill="#333">\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
