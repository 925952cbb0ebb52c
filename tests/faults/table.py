"""`make faults`: runs every test of the fault table and prints the table, with a result for each row.

    python -m tests.faults.table [--fast] [ROW ...]

The table stands in docs/recovery.md. A test belongs to row K3 if its name begins with `test_k3_`, wherever it lies.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "recovery.md"
_ROW = re.compile(r"^\| ([KPSRNHDX]\d) \| (.+?) \| (.+?) \|$", re.M)
_TEST = re.compile(r"test_([kpsrnhdx]\d)_")


@dataclass(frozen=True)
class Row:
    """A fault and what is to be seen of it."""

    name: str
    fault: str
    expected: str


def rows() -> list[Row]:
    """The rows of the table in docs/recovery.md, in order."""
    return [Row(*cells) for cells in _ROW.findall(PAGE.read_text("utf-8"))]


def row_of(test: str) -> str | None:
    """The row that a test's name gives: K3 of test_k3_...; None if it gives none."""
    match = _TEST.match(test)
    return match[1].upper() if match else None


@dataclass(eq=False)
class Results:
    """A pytest plugin that keeps the tests of `wanted` rows and sorts their outcomes by row."""

    wanted: set[str]
    passed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    skipped: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    repeated: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if row_of(item.name) in self.wanted]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = row_of(report.nodeid.rpartition("::")[2])
        if row is None:
            return
        if report.outcome == "failed":
            self.failed[row].append(report.nodeid)
        elif report.outcome == "skipped":
            self.skipped[row].append(str(report.longrepr[2] if isinstance(report.longrepr, tuple) else ""))
        elif report.outcome == "rerun":
            self.repeated[row] += 1
        elif report.when == "call":
            self.passed[row] += 1

    def of(self, row: str) -> str:
        """In a few words, such as `passed (3)`."""
        if self.failed[row]:
            return f"FAILED ({len(self.failed[row])} of {len(self.failed[row]) + self.passed[row]})"
        if self.passed[row]:
            more = f", {len(self.skipped[row])} skipped" if self.skipped[row] else ""
            more += f", {self.repeated[row]} repeated" if self.repeated[row] else ""
            return f"passed ({self.passed[row]}{more})"
        return f"skipped: {self.skipped[row][0]}" if self.skipped[row] else "NO TEST"


def show(results: Results) -> str:
    """The table as text, as wide as the terminal."""
    width = max(100, min(160, shutil.get_terminal_size().columns))
    widths = [3, 18, (width - 27) * 2 // 5, (width - 27) * 3 // 5]
    lines = []
    for row in [Row("row", "fault", "expected"), *(row for row in rows() if row.name in results.wanted)]:
        result = "result" if row.name == "row" else results.of(row.name)
        cells = [row.name, result, row.fault.replace("`", ""), row.expected.replace("`", "")]
        wrapped = [textwrap.wrap(cell, size) for cell, size in zip(cells, widths, strict=True)]
        for i in range(max(map(len, wrapped))):
            parts = (part[i] if i < len(part) else "" for part in wrapped)
            lines.append(
                "  ".join(f"{part:{size}}" for part, size in zip(parts, widths, strict=True)).rstrip()
            )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """0 if every chosen row has a test and none failed, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="leave out what `make test` leaves out")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="K1, S2 ... (all)")
    given = parser.parse_args(arguments)
    known = [row.name for row in rows()]
    wanted = {row.upper() for row in given.rows} or set(known)
    if unknown := wanted - set(known):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    results = Results(wanted)
    code = pytest.main(
        [str(REPOSITORY / "tests"), "--durations=0", "-qq", *(["-m", "not slow"] if given.fast else [])],
        plugins=[results],
    )
    print(f"\n{show(results)}")
    broken = any(results.of(row).startswith(("FAILED", "NO TEST")) for row in wanted)
    return int(code) or int(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
