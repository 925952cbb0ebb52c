"""`RunRecord`: the content of a run directory, whether the run is finished, running or killed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from forge.config.keys import read_toml
from forge.observe.json_lines import read_lines, read_object
from forge.runtime.errors import UserError

Points = tuple[list[int], list[float]]


@dataclass
class RunRecord:
    """The content of a run directory. The fields of missing files are empty.

    config, status: content of config.toml and status.json. lines, events: lines of metrics.jsonl and events.jsonl.

    plan: output of `train.py --plan --json` for the run, or {"problem": message}. `scripts/planned.py` sets this field; the
    run directory has no such file.
    """

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)

    def series(self, *keys: str) -> Points:
        """Return (steps, values) of the metrics field at the path `keys`, from all lines where the field is a number."""
        steps, values = [], []
        for line in self.lines:
            value = _value_at(line, keys)
            if isinstance(value, int | float):
                steps.append(int(line["step"]))
                values.append(float(value))
        return steps, values

    def names(self, *keys: str) -> list[str]:
        """Return the keys of the metrics object at the path `keys`. They come from all lines, in order of appearance."""
        found: dict[str, None] = {}
        for line in self.lines:
            value = _value_at(line, keys)
            if isinstance(value, dict):
                found.update(dict.fromkeys(value))
        return list(found)

    def having(self, key: str) -> Iterator[tuple[int, Any]]:
        """Yield (step, value of `key`) for every metrics line that has `key`."""
        return ((int(line["step"]), line[key]) for line in self.lines if key in line)

    def events_of(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of the kinds `kinds`, in order."""
        return [event for event in self.events if event["event"] in kinds]

    def last_event(self, kind: str) -> dict[str, Any]:
        """Return the last event of the kind `kind`; {} if there is none."""
        return next((event for event in reversed(self.events) if event["event"] == kind), {})

    def latest_training(self) -> RunRecord:
        """Return the record of the latest start that began to train, with only its lines and events.

        Lines and events are empty if no start has trained. Starts that were refused before training do not count.
        """
        kinds = [event["event"] for event in self.events]
        begun = max((place for place, kind in enumerate(kinds) if kind in ("fresh", "resumed")), default=None)
        if begun is None:
            return replace(self, lines=[], events=[])
        starts = [place for place, kind in enumerate(kinds) if kind == "started"]
        first = max((place for place in starts if place < begun), default=begun)
        events = self.events[first : min((place for place in starts if place > begun), default=None)]
        # A roll-back may return to a step before that of the start.
        returns = [event for event in events if event["event"] in ("fresh", "resumed", "rolled_back")]
        since = min(event.get("to_step", event.get("step", 0)) for event in returns)
        return replace(self, lines=[line for line in self.lines if line["step"] > since], events=events)

    def history_events_of(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of the kinds `kinds`, in order, without those of a replaced history.

        If a new history begins at a step of the replaced one, the events up to this step stay, as the metrics do.
        """
        found: list[dict[str, Any]] = []
        for event in self.events:
            if (kept := event.get("replaced_after")) is not None:
                # A roll-back belongs to the steps after `to_step`.
                found = [one for one in found if one.get("step", one.get("to_step", inf) + 1) <= kept]
            if event["event"] in kinds:
                found.append(event)
        return found


def _value_at(line: dict[str, Any], keys: Sequence[str]) -> Any:
    """Return the value at the path `keys`; None if it is missing."""
    value: Any = line
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def read_run(path: Path) -> RunRecord:
    """Read the run directory `path`. Skip incomplete lines and missing files.

    Raises UserError if `path` has neither metrics.jsonl nor events.jsonl.
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


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read several run directories as `read_run` does. Runs of one name are named by more of their paths, e.g. a/debug."""
    runs = [read_run(path) for path in paths]
    parts = [run.path.resolve().parts for run in runs]
    for run, own in zip(runs, parts, strict=True):
        others = [other for other in parts if other != own]
        depth = 1
        while depth < len(own) and any(other[-depth:] == own[-depth:] for other in others):
            depth += 1
        run.name = "/".join(own[-depth:])
    return runs
