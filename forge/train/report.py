"""What a run tells of itself as a whole: status.json and events.jsonl."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any, Literal

from forge.distributed import World
from forge.errors import BAD_CONFIG
from forge.files import replace_atomically
from forge.observe.events import EventLog, utc_now
from forge.observe.goodput import Ledger, read_past
from forge.observe.json_lines import encode
from forge.observe.run_directory import RunDirectory

log = logging.getLogger(__name__)

# Job scripts start the run again exactly when it says stopped.
State = Literal["running", "stopped", "finished", "failed"]


class Reporter:
    """status.json, events.jsonl and the ledger of goodput; silent on all ranks but the first.

    began: when this process began, on the monotonic clock (None: now).
    """

    def __init__(self, directory: RunDirectory, world: World, began: float | None = None):
        self.step = 0
        self._status = directory.status
        self.events: EventLog | None = None
        self.ledger: Ledger | None = None
        if world.rank == 0:
            self.events = EventLog(directory.events)
            past = read_past(directory.events, directory.status)
            self.ledger = Ledger(past, time.monotonic() if began is None else began, self.event)

    def event(self, kind: str, **fields: Any) -> None:
        """Append a line to events.jsonl."""
        if self.events is not None:
            self.events.write(kind, **fields)

    def running(self, step: int) -> None:
        """The run is alive, and has made `step` updates."""
        self.step = step
        self._write_status("running", "", None)

    def ended(self, state: State, reason: str, exit_code: int) -> None:
        """The run ends, for `reason`."""
        if self.ledger is not None:
            self.ledger.write()
            if exit_code != BAD_CONFIG:
                log.info("%s", self.ledger.table())
        self.event(state, step=self.step, reason=reason, exit_code=exit_code)
        self._write_status(state, reason, exit_code)

    def _write_status(self, state: State, reason: str, exit_code: int | None) -> None:
        """A disk that does not take it costs a warning and leaves the old file: no run ends for want of its status."""
        if self.events is None:
            return
        status = {
            "state": state,
            "step": self.step,
            "reason": reason,
            "exit_code": exit_code,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": utc_now(),
        }
        try:
            replace_atomically(self._status, encode(status))
        except OSError as error:
            log.warning("%s could not be replaced and is out of date: %s", self._status, error)
