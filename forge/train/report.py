"""What a run tells of itself as a whole: status.json and events.jsonl."""

from __future__ import annotations

from typing import Any

from forge.observe.events import EventLog
from forge.observe.run_directory import RunDirectory
from forge.observe.status import State, write_status
from forge.parallel.world import World


class Reporter:
    """status.json and events.jsonl; silent on all ranks but the first."""

    def __init__(self, directory: RunDirectory, world: World):
        self._status = directory.status if world.rank == 0 else None
        self.events = EventLog(directory.events) if world.rank == 0 else None
        self.step = 0

    def event(self, kind: str, **fields: Any) -> None:
        """Append a line to events.jsonl."""
        if self.events is not None:
            self.events.write(kind, **fields)

    def running(self, step: int) -> None:
        """The run is alive, and has made `step` updates."""
        self.step = step
        if self._status is not None:
            write_status(self._status, state="running", step=step, reason="", exit_code=None)

    def ended(self, state: State, reason: str, exit_code: int) -> None:
        """The run ends, for `reason`."""
        self.event(state, step=self.step, reason=reason, exit_code=exit_code)
        if self._status is not None:
            write_status(self._status, state=state, step=self.step, reason=reason, exit_code=exit_code)
