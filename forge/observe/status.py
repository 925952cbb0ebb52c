"""status.json: how a run stands. Job scripts start the run again exactly when it says stopped."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Literal

from forge.files import replace_atomically
from forge.observe.events import utc_now
from forge.observe.json_lines import encode

log = logging.getLogger(__name__)

State = Literal["running", "stopped", "finished", "failed"]


def write_status(path: Path, state: State, step: int, reason: str, exit_code: int | None) -> None:
    """Replace the file at `path` atomically. `exit_code` is None while running.

    A disk that does not take it costs a warning and leaves the old file: no run ends for want of its status.
    """
    status = {
        "state": state,
        "step": step,
        "reason": reason,
        "exit_code": exit_code,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": utc_now(),
    }
    try:
        replace_atomically(path, encode(status))
    except OSError as error:
        log.warning("%s could not be replaced and is out of date: %s", path, error)
