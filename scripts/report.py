#!/usr/bin/env python
"""Write a page about one or several runs: curves, events, goodput, layout, configurations, the inside of the model.

    python scripts/report.py runs/debug --output report.html
    python scripts/report.py runs/a runs/b --output both.html
    python scripts/report.py runs/debug --live

The page is a single file, which loads nothing from the network. --live serves the page to browsers on this machine and
follows the run. The printed address contains a token, and requests without the token are refused.

The script also plans each run from its config.toml, like train.py --plan. The page shows the plan next to the measurements.
The step time is planned for the run's GPU, or for --hardware. Needs the extra forge[report].
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.runtime.files import replace_atomically
from forge.tools.report.read import RunRecord, read_runs
from forge.tools.report.serve import PageServer
from scripts.options import (
    Options,
    add_trust_option,
    exit_code_of,
    local_path,
    port,
    positive,
    require_output,
)
from scripts.planned import Planner


def main(arguments: list[str] | None = None) -> int:
    """Write or serve the page and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="a run's directory, such as runs/debug")
    add("--output", type=local_path, help="the page to write (report.html)")
    add("--live", action="store_true", help="serve the page instead of writing it, until Ctrl-C")
    add("--port", type=port, default=8642, help="with --live: port on 127.0.0.1, 0 for any (%(default)s)")
    add(
        "--refresh",
        type=positive,
        default=10,
        metavar="S",
        help="with --live: seconds between loads (%(default)s)",
    )
    add("--hardware", metavar="NAME", help="hardware of the plan's step time, as for train.py --plan")
    add_trust_option(add)
    add("--no-plan", action="store_true", help="do not plan the runs; a plan takes seconds")
    given = parser.parse_args(arguments)
    if given.live and given.output is not None:
        parser.error("--output: cannot be combined with --live, which writes no page")
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> None:
    from forge.tools.report.page import make_page  # needs matplotlib

    planner = None if given.no_plan else Planner(given.hardware, given.trust)

    def read() -> list[RunRecord]:
        runs = read_runs(given.runs)
        for run in runs:
            if planner is not None:
                planner.add(run)
        return runs

    if not given.live:
        output = given.output or Path("report.html")
        require_output(output)
        replace_atomically(output, make_page(read()).encode())
        print(f"wrote {output}")
        return
    read()
    server = PageServer(lambda: make_page(read(), given.refresh), given.port)
    print(f"{server.url} follows {', '.join(map(str, given.runs))}; Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()


if __name__ == "__main__":
    sys.exit(main())
