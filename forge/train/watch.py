"""What looks on while the run goes its way: the two places to hook something in that the algorithm does not need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

Phase = Literal["set-up", "first step", "data", "step", "evaluation", "save", "end"]


class Watcher(Protocol):
    """Called on every rank around every step, in the order of the list; it must change nothing and not be collective."""

    def before_step(self, step: int) -> None:
        """`step` is about to be made; its batch is not yet read."""

    def after_step(self, step: int) -> None:
        """`step` has been launched; on a CUDA card it may still be running."""


class Phases:
    """What the run is doing now. The run says it once; whoever bounds or counts the time listens."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Phase, int], None]] = []
        self._first_step = 0
        self.now: tuple[Phase, int] = ("set-up", 0)

    def listen(self, listener: Callable[[Phase, int], None]) -> None:
        """Call `listener(phase, step)` at each change from now on, and once with the current phase."""
        self._listeners.append(listener)
        listener(*self.now)

    def enter(self, phase: Phase, step: int = 0) -> None:
        """The phase before has ended. The first step of a process, its wait for data included, is a phase of its own."""
        if phase in ("data", "step"):
            self._first_step = self._first_step or step
            phase = "first step" if step == self._first_step else phase
        if (phase, step) != self.now:
            self.now = phase, step
            for listener in self._listeners:
                listener(phase, step)

    @contextmanager
    def during(self, phase: Phase, step: int = 0) -> Iterator[None]:
        """`phase` in the body, then again what was before."""
        before = self.now
        self.enter(phase, step)
        yield
        self.enter(*before)
