"""`make faults`: run every test of the fault table and print the table with a result for each row.

    python -m tests.faults.table [--fast] [ROW ...]

The table is in docs/reference/faults.md. Tests of row K3 have names that begin with `test_k3_`, in any folder.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.support.diagnosed import REPOSITORY, row_of, rows

_DEFINITION = re.compile(r"^def (test_\w+)\(", re.M)


def files_of(wanted: set[str]) -> list[Path]:
    """Return the files with a test of a `wanted` row."""
    files = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    return [
        file
        for file in files
        if wanted & {row_of(name) for name in _DEFINITION.findall(file.read_text("utf-8"))}
    ]


@dataclass(eq=False)
class Results:
    """A pytest plugin: select the tests of `wanted` rows, and sort their outcomes by row."""

    wanted: set[str]
    collected: set[str] = field(default_factory=set)
    passed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    skipped: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    repeated: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if row_of(item.name) in self.wanted]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        self.collected = {row for item in chosen if (row := row_of(item.name)) is not None}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = row_of(report.nodeid.rpartition("::")[2])
        if row is None:
            return
        self.seconds[row] += report.duration
        if report.outcome == "failed":
            self.failed[row].append(report.nodeid)
        elif report.outcome == "skipped":
            why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")
            self.skipped[row].append(why.removeprefix("Skipped: "))
        elif report.outcome == "rerun":
            self.repeated[row] += 1
        elif report.when == "call":
            self.passed[row] += 1

    def kind(self, row: str) -> str:
        """Return passed, FAILED, skipped, NOT RUN (interrupted before) or NO TEST."""
        if self.failed[row]:
            return "FAILED"
        if self.passed[row] or self.skipped[row]:
            return "passed" if self.passed[row] else "skipped"
        return "NOT RUN" if row in self.collected else "NO TEST"

    def of(self, row: str) -> str:
        """Return the row's result in a few words, e.g. `passed (3)`."""
        failed, passed, skipped = len(self.failed[row]), self.passed[row], len(self.skipped[row])
        counts = {
            f"{failed} of {failed + passed}" if failed else f"{passed}": failed or passed,
            f"{skipped} skipped": skipped and passed,
            f"{self.repeated[row]} repeated": self.repeated[row],
        }
        outcome = ", ".join(text for text, count in counts.items() if count)
        return f"{self.kind(row)} ({outcome})" if outcome else self.kind(row)


def show(results: Results) -> str:
    """Return the table as text, as wide as the terminal, followed by failures, skips and a summary line."""
    width = max(100, min(160, shutil.get_terminal_size().columns))
    widths = [3, 22, 5, (width - 38) * 2 // 5, (width - 38) * 3 // 5]
    chosen = [row for row in rows() if row.name in results.wanted]
    lines = [_line(("row", "result", "time", "fault", "expected"), widths), "-" * width]
    for row in chosen:
        outcome, took = results.of(row.name), f"{results.seconds[row.name]:.0f} s"
        lines.append(_line((row.name, outcome, took, row.fault, row.expected), widths))
    lines += ["", *(f"FAILED  {test}" for row in chosen for test in results.failed[row.name])]
    lines += [
        f"skipped {row.name}: {why}" for row in chosen for why in dict.fromkeys(results.skipped[row.name])
    ]
    counts = Counter(results.kind(row.name) for row in chosen)
    outcome = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return "\n".join([*lines, f"{len(chosen)} rows in {sum(results.seconds.values()):.0f} s: {outcome}"])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return wrapped cells side by side."""
    columns = [textwrap.wrap(cell.replace("`", ""), size) for cell, size in zip(cells, widths, strict=True)]
    lines = []
    for parts in zip_longest(*columns, fillvalue=""):
        lines.append("  ".join(f"{part:{size}}" for part, size in zip(parts, widths, strict=True)).rstrip())
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Return 0 if every chosen row has a test and none failed, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="skip the slow tests, like `make test`")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="K1, S2 ... (all)")
    given = parser.parse_args(arguments)
    known = [row.name for row in rows()]
    wanted = {row.upper() for row in given.rows} or set(known)
    if unknown := wanted - set(known):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    results = Results(wanted)
    code = pytest.main(
        # Without the options of pyproject.toml, which list the slowest tests.
        [
            *map(str, files_of(wanted)),
            "-o",
            "addopts=",
            "-q",
            "--reruns=1",
            "-m",
            "not slow" if given.fast else "",
        ],
        plugins=[results],
    )
    print(f"\n{show(results)}")
    broken = any(results.kind(row) in ("FAILED", "NOT RUN", "NO TEST") for row in wanted)
    return int(code) or int(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
