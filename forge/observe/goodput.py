"""Where the wall time of a run went, over all its starts: steps that count, and everything else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from forge.observe.progress import format_duration

# In the order of the table. Only "steps" is what the run is for.
KINDS = ("steps", "set-up", "first step", "data", "evaluation", "save", "repeated steps", "down")


@dataclass
class Past:
    """Earlier starts of a run: seconds by kind up to `until`, and the last step that they made."""

    seconds: dict[str, float] = field(default_factory=dict)
    step: int = 0
    until: datetime | None = None


def read_past(events: Path, status: Path) -> Past:
    """Read events.jsonl and status.json as they are before this start writes to them.

    A ledger is written now and then; the time after the last one of a killed process is counted up to its latest event or
    status. Torn lines are skipped.
    """
    past, kind = Past(), "set-up"
    for event in _events(events):
        when, what = event["time"], event["event"]
        if what == "started":
            _book(past, "down", when)
            kind = "set-up"
        elif what == "goodput":
            past.seconds, past.step = dict(event["seconds"]), max(past.step, int(event["step"]))
            past.until, kind = when, "steps"
        else:
            _book(past, kind, when)
            kind = "steps" if what in ("fresh", "resumed") else kind
    with suppress(OSError, ValueError, KeyError, TypeError):
        last = json.loads(status.read_text())
        _book(past, kind, datetime.fromisoformat(last["time"]))
        past.step = max(past.step, int(last["step"]))
    return past


class Ledger:
    """Counts the time of this process by phase, on top of the `past`.

    began: the time of the monotonic clock when the process began. `report_event("goodput", ...)` is called after the first
    step and each save, so that a process that is killed leaves most of its time.
    """

    def __init__(self, past: Past, began: float, report_event: Callable[..., None]):
        self._seconds = {kind: past.seconds.get(kind, 0.0) for kind in KINDS}
        # The step under way, the last one that has been made, and the last one before the way came back to this step.
        self._step, self._made, self._made_before = 0, past.step, past.step
        self._phase, self._since, self._report_event = "set-up", began, report_event
        if past.until is not None:
            start = time.time() - (time.monotonic() - began)
            self._seconds["down"] += max(0.0, start - past.until.timestamp())

    def enter(self, phase: str, step: int) -> None:
        """`phase` (of `step`) begins, the one before has ended."""
        ended = self._phase
        self.seconds()  # of the phase before
        begins = phase in ("data", "step", "first step")
        if step != self._step or not begins:
            self._made = max(self._made, self._step)
        if step != self._step and begins:
            self._step, self._made_before = step, self._made
        self._phase = phase
        if ended in ("first step", "save") and phase != ended:
            self.write()

    def seconds(self) -> dict[str, float]:
        """By kind, up to now."""
        kind = "save" if self._phase == "end" else self._phase
        if self._phase == "step":
            kind = "repeated steps" if self._step <= self._made_before else "steps"
        now = time.monotonic()
        self._seconds[kind] += now - self._since
        self._since = now
        return dict(self._seconds)

    def write(self) -> None:
        """Write the ledger as an event."""
        seconds = self.seconds()
        share = seconds["steps"] / (sum(seconds.values()) or 1.0)
        rounded = {kind: round(value, 3) for kind, value in seconds.items()}
        self._report_event("goodput", step=self._made, goodput=share, seconds=rounded)

    def table(self) -> str:
        """For the end of a run."""
        seconds = self.seconds()
        total = sum(seconds.values()) or 1.0
        rows = [f"  {kind:<15}{format_duration(s):>8}{s / total:8.1%}" for kind, s in seconds.items() if s]
        share = seconds["steps"] / total
        return "\n".join([f"{share:.1%} of {format_duration(total)} went into steps that count:", *rows])


def _book(past: Past, kind: str, until: datetime) -> None:
    if past.until is not None:
        past.seconds[kind] = past.seconds.get(kind, 0.0) + max(0.0, (until - past.until).total_seconds())
    if past.until is None or until > past.until:
        past.until = until


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # a torn line
            event = json.loads(line)
            yield event | {"time": datetime.fromisoformat(event["time"])}
