#!/usr/bin/env python
"""Draw the timeline of a pipeline schedule, with the work of each rank, as an SVG image.

python scripts/plot_pipeline.py --schedule ZBVZeroBubble --ranks 4 --microbatches 8 --output timeline.svg

Needs the extra forge[report].
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.config.keys import literals
from forge.config.layout import Pipeline
from forge.config.pipeline import ONE_PER_RANK
from forge.parallel.pipeline.schedule import Schedule, TimedAction, make_schedule, read_schedule
from forge.runtime.errors import UserError, did_you_mean
from scripts import images
from scripts.options import Options, local_path, positive

COLORS = {"F": "#93c5fd", "B": "#86efac", "I": "#bbf7d0", "W": "#fcd34d"}
NAMES = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}


def main(argv: list[str]) -> int:
    """Draw and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add("--schedule", required=True, help="a value of pipeline.schedule: a name, or a CSV file")
    add("--ranks", type=positive, default=4, help="parallel.pp (default: 4)")
    add("--microbatches", type=positive, default=8, help="microbatches per optimizer step (default: 8)")
    add(
        "--stages-per-rank",
        type=positive,
        default=2,
        help="stages of a rank in looped schedules (default: 2)",
    )
    add(
        "--whole-backward",
        action="store_true",
        help="do not split backward passes, as with recomputation or compilation",
    )
    add(
        "--output",
        type=local_path,
        default=Path("pipeline.svg"),
        help="image to write (default: pipeline.svg)",
    )
    given = parser.parse_args(argv)
    return images.write(given.output, lambda: _picture(given))


def _picture(given: argparse.Namespace) -> str:
    schedule = _schedule(given)
    schedule = schedule.unsplit() if given.whole_backward else schedule
    print(f"{given.output}: idle {schedule.bubble:.1%} of the time")
    return draw(schedule, given.schedule)


def _schedule(chosen: argparse.Namespace) -> Schedule:
    if chosen.schedule.endswith(".csv"):
        return read_schedule(Path(chosen.schedule), chosen.ranks, chosen.microbatches)
    names = literals(Pipeline.model_fields["schedule"].annotation)
    if chosen.schedule not in names:
        close = did_you_mean(chosen.schedule, names)
        raise UserError(
            f"--schedule {chosen.schedule}: must be one of {', '.join(names)}, or a CSV file{close}"
        )
    per_rank = 1 if chosen.schedule in ONE_PER_RANK else chosen.stages_per_rank
    return make_schedule(chosen.schedule, chosen.ranks, chosen.ranks * per_rank, chosen.microbatches)


def draw(schedule: Schedule, title: str) -> str:
    """Draw the schedule as SVG, with time in units of a forward pass."""
    return draw_timeline(
        schedule.timeline,
        f"{Path(title).name}: {schedule.microbatches} microbatches; idle {schedule.bubble:.1%}",
    )


def draw_timeline(timeline: Sequence[Sequence[TimedAction]], title: str) -> str:
    """Draw a timeline as SVG: one row per stage, grouped by rank. The id of each bar ends with its action, e.g. 0F3.

    timeline: actions of each rank.
    """
    from forge.tools.report.draw import STYLE, as_svg, matplotlib, new_figure  # needs matplotlib

    own_stages = [sorted({slot.action.stage for slot in slots}) for slots in timeline]
    rows = [(rank, stage) for rank, own in enumerate(own_stages) for stage in own]
    # Leave half a row between ranks.
    y = {stage: row + rank / 2 for row, (rank, stage) in enumerate(rows)}
    end = max(slot.stop for slots in timeline for slot in slots)
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = new_figure(10.4, 1.0 + 0.26 * len(rows), left=1.2, top=0.4)
        axes = figure.add_subplot(xlim=(0, end), xlabel="time")
        seen: dict[str, Any] = {}
        for slots in timeline:
            for (stage, kind, microbatch), start, stop in slots:
                bar = axes.barh(y[stage], stop - start, 0.9, start, color=COLORS[kind], edgecolor="white")
                bar.patches[0].set_gid(f"bar-{stage}{kind}{microbatch}")
                seen.setdefault(kind, bar)
                if stop - start > end / 80:
                    axes.bar_label(bar, [str(microbatch)], label_type="center", fontsize=7)
        axes.set_yticks(
            [y[stage] for _, stage in rows], [f"rank {rank}, stage {stage}" for rank, stage in rows]
        )
        axes.invert_yaxis()
        kinds = sorted(seen, key="FBIW".index)
        axes.legend(
            [seen[kind] for kind in kinds],
            [NAMES[kind] for kind in kinds],
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=4,
        )
        axes.set_title(f"{title}; {len(timeline)} ranks, {len(rows)} stages", loc="left")
        return as_svg(figure, "pipeline")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
