#!/usr/bin/env python
"""Draw the load of the experts during a run as an SVG image: `python scripts/plot_experts.py RUN_DIRECTORY`.

Needs the extra forge[report].
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.runtime.errors import UserError
from forge.tools.report.read import read_run
from scripts import images
from scripts.options import Options, local_path


def main(argv: list[str]) -> int:
    """Draw and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add("run", type=Path, help="the run's directory, which holds metrics.jsonl")
    add(
        "--output", type=local_path, default=Path("experts.svg"), help="image to write (default: experts.svg)"
    )
    add("--mark", type=float, default=1.5, help="load to mark by a horizontal line (default: 1.5)")
    given = parser.parse_args(argv)
    return images.write(given.output, lambda: draw(given.run, given.mark))


def draw(path: Path, mark: float) -> str:
    """Draw the load of experts as SVG: curves of each layer's largest load by step, and below them maps of all loads.

    mark: load of a dashed horizontal line. Raises UserError if the metrics have no expert counts.
    """
    from forge.tools.report.inside import expert_pictures  # needs matplotlib

    pictures = expert_pictures(read_run(path), levels=[(f"{mark:g}", mark)])
    if not pictures:
        raise UserError(
            f"{path} has no expert counts in its metrics.jsonl; set metrics.expert_map_interval in a run with [model.moe]"
        )
    return images.stacked([picture.svg for picture in pictures])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
