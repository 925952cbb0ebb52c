"""Collect garbage only at fixed steps. An automatic collection on one rank would delay all ranks that wait for it."""

from __future__ import annotations

import gc
import time
from typing import Any

from forge.hook import Hook


class Collector(Hook):
    """Replaces automatic collections during a run with one collection every `interval` steps; 0: automatic collection.

    Objects made before the run (modules, model, optimizer) are collected once and then frozen, so later collections
    skip them. Every rank collects at the same steps, so all ranks pause together. A collection covers only young
    objects (generation 1), which takes milliseconds. The time of collections is measured even if `interval` is 0.
    """

    def __init__(self, interval: int):
        self._interval = interval
        self._was_enabled = False
        self._seconds = 0.0
        self._began = 0.0

    def before_run(self, step: int) -> None:
        if self._interval:
            self._was_enabled = gc.isenabled()
            gc.collect()
            gc.freeze()
            gc.disable()
        gc.callbacks.append(self._time)

    def after_step(self, step: int) -> None:
        if self._interval and step % self._interval == 0:
            gc.collect(1)

    def take_seconds(self) -> float:
        """Return the seconds spent in collections since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _time(self, phase: str, _info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._seconds += time.perf_counter() - self._began

    def after_run(self) -> None:
        gc.callbacks.remove(self._time)
        if self._interval:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
