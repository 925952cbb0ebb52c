"""What a run tells of itself as a whole: status.json and events.jsonl."""

from __future__ import annotations

import logging
import time
from typing import Any

from forge.observe.events import EventLog
from forge.observe.goodput import Ledger, read_past
from forge.observe.run_directory import RunDirectory
from forge.observe.status import State, write_status
from forge.parallel.world import World

log = logging.getLogger(__name__)


class Reporter:
    """status.json, events.jsonl and the ledger of goodput; silent on all ranks but the first.

    began: when this process began, on the monotonic clock (None: now).
    """

    def __init__(self, directory: RunDirectory, world: World, began: float | None = None):
        first = world.rank == 0
        self._status = directory.status if first else None
        self.events = EventLog(directory.events) if first else None
        self.ledger: Ledger | None = None
        if first:
            past = read_past(directory.events, directory.status)
            self.ledger = Ledger(past, time.monotonic() if began is None else began, self.event)
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
        if self.ledger is not None:
            self.ledger.write()
            log.info("%s", self.ledger.table())
        self.event(state, step=self.step, reason=reason, exit_code=exit_code)
        if self._status is not None:
            write_status(self._status, state=state, step=self.step, reason=reason, exit_code=exit_code)
