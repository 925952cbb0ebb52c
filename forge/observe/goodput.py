"""Goodput: the wall time of a run by kind, over all its starts (launches).

Only steps that no later start repeats are useful.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from forge.observe.progress import format_duration

# Kinds of time in the order of the table. Only "steps" is useful time.
KINDS = ("steps", "set-up", "first step", "data", "evaluation", "save", "repeated steps", "down")


@dataclass
class Past:
    """Totals of earlier starts of the run: seconds by kind up to the time `until`, and the last step."""

    seconds: dict[str, float] = field(default_factory=dict)
    step: int = 0
    until: datetime | None = None

    def add(self, kind: str, until: datetime) -> None:
        """Add the time between `self.until` and `until` to the total of `kind`. Set `self.until` to `until`."""
        if self.until is not None:
            more = max(0.0, (until - self.until).total_seconds())
            self.seconds[kind] = self.seconds.get(kind, 0.0) + more
        self.until = max(until, self.until or until)


def read_past(events: Path, status: Path) -> Past:
    """Return the totals of earlier starts, read from events.jsonl and status.json.

    Call before this start writes to these files. A goodput event has all seconds so far, but is written only
    occasionally. The time of a killed process after its last goodput event is estimated from its later events and its
    status. Torn lines are skipped. A new history in the directory repeats no step of the history that it replaced.
    """
    past, kind = Past(), "set-up"
    for line in events.read_bytes().splitlines() if events.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # a torn line
            event = json.loads(line)
            name, when = event["event"], datetime.fromisoformat(event["time"])
            if name == "started":
                past.add("down", when)
                kind = "set-up"
            elif name == "goodput":
                step = max(past.step, int(event["step"]))
                past, kind = Past(dict(event["seconds"]), step, when), "steps"
            else:
                past.add(kind, when)
                kind = "steps" if name in ("fresh", "resumed") else kind
                if event.get("replaced_after") is not None:
                    past.step = int(event["step"])
    with suppress(OSError, ValueError, KeyError, TypeError):
        last = json.loads(status.read_text())
        past.add(kind, datetime.fromisoformat(last["time"]))
        past.step = max(past.step, int(last["step"]))
    return past


class Ledger:
    """Sums the time of phases (step, save, ...) by kind, starting from the totals `past`.

    began: start of the process on the monotonic clock. `report_event("goodput", ...)` is called after the first step
    and after each save, so a killed process loses little.
    """

    def __init__(self, past: Past, began: float, report_event: Callable[..., None]):
        self._seconds = {kind: past.seconds.get(kind, 0.0) for kind in KINDS}
        # The current step, the last step made, and the last step made before the current step began.
        self._step, self._made, self._made_before = 0, past.step, past.step
        self._phase, self._since, self._report_event = "set-up", began, report_event
        if past.until is not None:
            start = time.time() - (time.monotonic() - began)
            self._seconds["down"] += max(0.0, start - past.until.timestamp())

    def begin_history(self, step: int) -> None:
        """Begin a new history after `step`. Its steps repeat none of the history that it replaces."""
        self._made = self._made_before = step

    def enter(self, phase: str, step: int) -> None:
        """Add the time of the ended phase to its kind. Begin `phase` of step `step`."""
        ended = self._phase
        self.seconds()  # adds the time of the ended phase
        in_step = phase in ("data", "step", "first step")
        if step != self._step or not in_step:
            self._made = max(self._made, self._step)
        if step != self._step and in_step:
            self._step, self._made_before = step, self._made
        self._phase = phase
        if ended in ("first step", "save") and phase != ended:
            self.write()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each kind, up to now."""
        kind = "save" if self._phase == "end" else self._phase
        if self._phase == "step":
            kind = "repeated steps" if self._step <= self._made_before else "steps"
        now = time.monotonic()
        self._seconds[kind] += now - self._since
        self._since = now
        return dict(self._seconds)

    def write(self) -> None:
        """Write the seconds so far as a goodput event."""
        seconds = self.seconds()
        share = seconds["steps"] / (sum(seconds.values()) or 1.0)
        rounded = {kind: round(value, 3) for kind, value in seconds.items()}
        self._report_event("goodput", step=self._made, goodput=share, seconds=rounded)

    def table(self) -> str:
        """Return the table of seconds by kind, for the end of a run."""
        seconds = self.seconds()
        total = sum(seconds.values()) or 1.0
        rows = [f"  {kind:<15}{format_duration(s):>8}{s / total:8.1%}" for kind, s in seconds.items() if s]
        share = seconds["steps"] / total
        return "\n".join([f"{share:.1%} of {format_duration(total)} went into useful steps:", *rows])
