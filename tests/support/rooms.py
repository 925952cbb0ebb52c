"""Seconds per room: what each folder of tests takes, printed at the end of a test run."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

seconds: dict[str, float] = defaultdict(float)
tests: dict[str, set[str]] = defaultdict(set)


def add(nodeid: str, duration: float) -> None:
    """Count a phase (setup, call or teardown) of a test."""
    parts = Path(nodeid.partition("::")[0]).parts
    room = parts[1] if len(parts) > 2 else "tests"
    seconds[room] += duration
    tests[room].add(nodeid)


def table() -> list[str]:
    """One line per room, the slowest first, and the sum."""
    rows = sorted(seconds, key=lambda room: -seconds[room])
    lines = [f"{'room':14} {'tests':>6} {'seconds':>8}"]
    lines += [f"{room:14} {len(tests[room]):6} {seconds[room]:8.1f}" for room in rows]
    lines.append(f"{'all':14} {sum(map(len, tests.values())):6} {sum(seconds.values()):8.1f}")
    return lines
