#!/usr/bin/env python
"""Explain a failed, hanging or slow run: the first cause, its rank, and the next steps.

    python scripts/diagnose.py runs/debug

Reads status.json and events.jsonl. Reads the messages, stacks and records of collectives of all ranks in logs/, and the
traces in profile/. Prints a page of text.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.tools.report.diagnose import diagnose
from scripts.options import Options, exit_code_of


def main(arguments: list[str] | None = None) -> int:
    """Print the diagnosis and return the exit code."""
    parser = Options(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory, such as runs/debug")
    given = parser.parse_args(arguments)
    return exit_code_of(lambda: print(diagnose(given.run)))


if __name__ == "__main__":
    sys.exit(main())
