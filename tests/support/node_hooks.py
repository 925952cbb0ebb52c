"""Hooks for runs whose nodes come and go."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from forge.hook import Hook

GATE_STEP = 100


class SlowNode(Hook):
    """Makes the ranks slow that are started with SLOW_NODE in their environment."""

    def __init__(self, trainer: Any):
        self._seconds = 1.0 if "SLOW_NODE" in os.environ else 0.0

    def before_data(self, step: int) -> None:
        # It counts as time of the data: the hook that measures comes first.
        time.sleep(self._seconds)


class Gate(Hook):
    """Before step GATE_STEP, waits for a request to stop or for the file `gate` in the run directory."""

    def __init__(self, trainer: Any):
        self._signals, self._gate = trainer.signals, Path(trainer.reporter.directory.root) / "gate"

    def before_step(self, step: int) -> None:
        while step == GATE_STEP and self._signals.reason is None and not self._gate.exists():
            time.sleep(0.05)
