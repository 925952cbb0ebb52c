"""Check after each fault test: `scripts/diagnose.py` must name the planted cause in the test's run directories."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from forge.tools.report.diagnose import diagnose, named_first, read_incidents
from forge.tools.report.read import read_run

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "reference" / "faults.md"
_ROW = re.compile(r"^\| ([KPSRNHDXE]\d+) \| (.+?) \| (.+?) \| (.+?) \|$", re.M)
_TEST = re.compile(r"test_([kpsrnhdxe]\d+)_")


@dataclass(frozen=True)
class Row:
    """One fault. causes: its causes; a diagnosis must name `causes[0]` first. expected: the visible effect."""

    name: str
    fault: str
    causes: tuple[str, ...]
    expected: str


def rows() -> list[Row]:
    """Return the rows of the table in docs/reference/faults.md, in order."""
    found = _ROW.findall(PAGE.read_text("utf-8"))
    return [
        Row(name, fault, tuple(re.findall("`(.+?)`", causes)), expected)
        for name, fault, causes, expected in found
    ]


def row_of(test: str) -> str | None:
    """Return the row in a test's name, e.g. K3 for test_k3_...; None if the name has none."""
    match = _TEST.match(test)
    return match[1].upper() if match else None


def require_named(test: pytest.Function, folder: Path) -> None:
    """Fail unless a diagnosis of the runs in `folder` first names the cause planted by `test`."""
    marker = test.get_closest_marker("planted")
    causes = marker.args if marker else {row.name: row.causes for row in rows()}.get(row_of(test.name) or "")
    runs = [read_run(path) for path in sorted({path.parent for path in folder.rglob("events.jsonl")})]
    if not causes or not runs:
        return
    first = {named for run in runs if (named := named_first(run)) is not None}
    found = {one.cause for run in runs for one in read_incidents(run)}
    assert causes[0] in first and first <= set(causes) <= found, "\n".join(diagnose(run.path) for run in runs)
