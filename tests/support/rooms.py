"""Print the seconds of each folder of tests at the end of a test run."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

seconds: dict[str, float] = defaultdict(float)
tests: dict[str, set[str]] = defaultdict(set)


def add(nodeid: str, duration: float) -> None:
    """Add the duration of one phase (setup, call or teardown) of a test."""
    parts = Path(nodeid.partition("::")[0]).parts
    room = parts[1] if len(parts) > 2 else "tests"
    seconds[room] += duration
    tests[room].add(nodeid)


def table() -> list[str]:
    """Return a Markdown table: one line per folder, the slowest first, then the sum."""
    rows = [
        (room, len(tests[room]), seconds[room]) for room in sorted(seconds, key=lambda room: -seconds[room])
    ]
    rows.append(("all", sum(map(len, tests.values())), sum(seconds.values())))
    lines = [f"| {room:12} | {count:5} | {seconds:7.0f} |" for room, count, seconds in rows]
    return ["| room         | tests | seconds |", "|---|---|---|", *lines]
