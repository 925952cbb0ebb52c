"""Hooks for runs with joining and leaving nodes, and hooks that refuse a run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from forge.hook import Hook
from forge.runtime.errors import UserError

GATE_STEP = 100


class SlowNode(Hook):
    """Slow down every rank with SLOW_NODE in its environment."""

    def __init__(self, trainer: Any):
        self._seconds = 1.0 if "SLOW_NODE" in os.environ else 0.0

    def before_data(self, step: int) -> None:
        # This sleep counts as data time, because the measuring hook runs first.
        time.sleep(self._seconds)


class Gate(Hook):
    """Before step GATE_STEP, wait for a stop request or for the file `gate` in the run directory."""

    def __init__(self, trainer: Any):
        self._signals, self._gate = trainer.signals, Path(trainer.reporter.directory.root) / "gate"

    def before_step(self, step: int) -> None:
        while step == GATE_STEP and self._signals.reason is None and not self._gate.exists():
            time.sleep(0.05)


class Refusing(Hook):
    """Refuse the run, after model, optimizer and state are ready."""

    def __init__(self, trainer: Any):
        raise UserError("not today")


class RefusingOnTheLastRank(Hook):
    """Refuse the run on the last rank only."""

    def __init__(self, trainer: Any):
        if trainer.reporter.world.rank == trainer.reporter.world.size - 1:
            raise UserError("not on this node")
