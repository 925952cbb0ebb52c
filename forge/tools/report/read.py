"""`RunRecord`: the readable content of a run directory, in any state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.config.keys import read_toml
from forge.observe.json_lines import read_lines, read_object
from forge.runtime.errors import UserError

Points = tuple[list[int], list[float]]


@dataclass
class RunRecord:
    """The content of a run directory.

    config, status: read from their files, empty if absent. lines, events: from the .jsonl files.

    plan: the output of `train.py --plan --json` for the run, or {"problem": message}. No file has it; `scripts/planned.py`
    sets it.
    """

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)

    def series(self, *keys: str) -> Points:
        """Return steps and values of the metrics field at this path. Lines without a number there are left out."""
        steps, values = [], []
        for line in self.lines:
            value: Any = line
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, int | float):
                steps.append(int(line["step"]))
                values.append(float(value))
        return steps, values

    def names(self, *keys: str) -> list[str]:
        """Return all keys of the object at this path in the metrics, over all lines, in order of appearance."""
        found: dict[str, None] = {}
        for line in self.lines:
            value: Any = line
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, dict):
                found.update(dict.fromkeys(value))
        return list(found)

    def having(self, key: str) -> Iterator[tuple[int, Any]]:
        """Yield (step, value of `key`) for every metrics line that has `key`."""
        return ((int(line["step"]), line[key]) for line in self.lines if key in line)

    def events_of(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of these kinds, in order."""
        return [event for event in self.events if event["event"] in kinds]


def read_run(path: Path) -> RunRecord:
    """Read a run directory.

    Raises UserError if the folder is not a run directory. Torn lines and missing files are left out.
    """
    if not (path / "events.jsonl").exists() and not (path / "metrics.jsonl").exists():
        raise UserError(
            f"{path} is not the directory of a run: it has neither metrics.jsonl nor events.jsonl"
        )
    config: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        config = read_toml((path / "config.toml").read_text("utf-8"))
    return RunRecord(
        path,
        path.resolve().name,
        config,
        read_object(path / "status.json"),
        read_lines(path / "metrics.jsonl", "step"),
        read_lines(path / "events.jsonl", "event"),
    )
