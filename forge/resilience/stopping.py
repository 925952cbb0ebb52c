"""Stop a run after a save: at SIGTERM, SIGINT, SIGUSR1 or SIGHUP, or when the time limit is near.

train.py imports this module before all slow imports, so it must not import torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from forge.runtime.errors import STOPPED
from forge.runtime.terminal import stderr

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# Signals within this number of seconds of each other are one request. At a preemption or time limit, Slurm sends
# SIGTERM twice within milliseconds, to torchrun and to its workers, and torchrun forwards each signal to its workers.
SAME_REQUEST_S = 2.0
# Before the first save: the fraction of the time limit reserved for a save, and its upper bound in seconds.
UNKNOWN_SAVE, UNKNOWN_SAVE_S = 0.05, 600.0
# Number of steps to reserve. All ranks see a request one step later, and this step may be slower than the previous
# steps.
STEPS = 3
# The largest fraction of the time limit reserved for evaluations.
MOST_EVALUATIONS = 0.25

_active: StopSignals | None = None


class StopSignals:
    """Context manager. In its body, a signal requests a stop instead of ending the process. Use only in the main thread.

    Before `defer` is called, the first request ends the process at once with exit code 75, because no step has been
    made and nothing is lost. `leaving(reason)` is called first, in another thread.

    After `defer`, the first request sets `reason`, which the training loop shares with all ranks. The second request
    only prints a message, because a save may be running. The third request ends the process at once with exit code 75.
    Signals within SAME_REQUEST_S of each other are one request.

    Entering another instance in the body disables the outer instance.

    Python runs a signal handler in the main thread between two bytecodes, and not while this thread waits in a hanging
    collective. Therefore a second thread, woken by the interpreter's C handler, counts the requests, prints the
    messages, and ends the process. The handler itself only sets `reason`.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.final = False
        """Whether a hook has ended the run, so that job scripts do not start it again."""
        self.deferred = False
        self.leaving: Callable[[str], None] = lambda reason: None
        self._previous: dict[int, Any] = {}

    def defer(self) -> None:
        """Change the effect of requests: the run now finishes its step and saves before it stops."""
        self.deferred = True

    def __enter__(self) -> StopSignals:
        global _active
        listening, self._waking = os.pipe()
        os.set_blocking(self._waking, False)
        self._counting = threading.Thread(
            target=self._count_requests, args=(listening,), name="stop-signals", daemon=True
        )
        self._counting.start()
        self._previous_wakeup = signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        for number in SIGNALS:
            # nohup keeps the run alive after the terminal is closed.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        self._outer, _active = _active, self
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        _active = self._outer
        if self._outer is not None:
            self._outer.deferred = self.deferred
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._waking)
        self._counting.join(timeout=1.0)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # A handler may interrupt any Python code, including logging, so it must neither take a lock nor log.
        self.reason = self.reason or signal.Signals(number).name

    def _count_requests(self, listening: int) -> None:
        """Print the effect of each request. End the process at the third request; before `defer`, at the first request.

        listening: read end of a pipe; the interpreter writes the number of each signal to the pipe. Returns when the
        write end is closed.
        """
        requests, last = 0, -math.inf
        speak = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
        while numbers := os.read(listening, 64):
            names = [signal.Signals(number).name for number in numbers if number in SIGNALS]
            if not names:
                continue
            now = time.monotonic()
            new, last = now - last >= SAME_REQUEST_S, now
            requests += new
            if not self.deferred:
                message = "stopped before the first step; nothing was lost"
                if speak:
                    _to_stderr(f"{names[0]}: {message}")
                with contextlib.suppress(Exception):
                    self.leaving(f"{names[0]}: {message}")
                os._exit(STOPPED)
            if requests >= 3:
                _to_stderr("third request to stop: leaving at once")
                os._exit(STOPPED)
            if new and speak:
                first = "stopping after this step, once a checkpoint is saved"
                second = (
                    "already stopping, and a save may be running; send one more signal after a few seconds to end the run at "
                    "once"
                )
                _to_stderr(f"{names[0]}: {first if requests == 1 else second}")
        os.close(listening)


def _to_stderr(text: str) -> None:
    stderr.write(f"forge: {text}\n")


def _block_signals() -> None:
    if _active is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock_signals() -> None:
    if _active is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _restore_in_child() -> None:
    if _active is None:
        return
    while _active is not None:
        _active.__exit__()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


# SIGTERM must end a forked child and must not wake the parent's thread. So signals are blocked until the child has
# restored the handlers.
os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_restore_in_child)


class TimeLimit:
    """The time limit of a process, which must save and end within `limit_s` seconds after `began` (monotonic clock).

    waits_s: the longest wait after the last save. evaluations_s: the longest time of all evaluations after one step; `enter`
    raises it. `enter` listens to the run's phases, to measure the durations of steps and evaluations.
    """

    def __init__(self, limit_s: float, began: float, waits_s: float = 0.0, evaluations_s: float = 0.0):
        self._limit_s, self._began, self._waits_s = limit_s, began, waits_s
        self.evaluations_s = evaluations_s
        self._phase, self._since = "", began
        self._evaluated_s = 0.0  # since the last step
        self._compiling = 0  # number of steps for which to reserve a first step
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=10))

    def enter(self, phase: str, _step: int) -> None:
        """Call when `phase` begins and the previous phase has ended."""
        now = time.monotonic()
        if self._phase == "evaluation":
            self._evaluated_s += now - self._since
            self.evaluations_s = max(self.evaluations_s, self._evaluated_s)
        else:
            self._recent[self._phase].append(now - self._since)
        if phase in ("data", "first step"):
            self._evaluated_s = 0.0
        self._phase, self._since = phase, now

    def expect(self, growth: float, compiles: bool) -> None:
        """Adapt to the settings of the next step. Call once per step.

        growth: tokens of the next step per token of this step. compiles: True if the next step may compile.
        """
        for kind in ("step", "first step"):
            self._recent[kind] = deque(
                (max(growth, 1.0) * step_s for step_s in self._recent[kind]), maxlen=10
            )
        # Until the first step with the new settings has ended, and a second one, which shows their usual duration.
        self._compiling = 3 if compiles else self._compiling - 1

    def near(self, save_s: float) -> bool:
        """Return whether the run must stop now. save_s: duration of the slowest save so far in seconds; 0: no save yet."""
        # In the worst case a save is in flight, and the final save has to wait for it.
        saves = 2 * save_s if save_s else min(UNKNOWN_SAVE * self._limit_s, UNKNOWN_SAVE_S)
        steps = STEPS * sum(max(self._recent[phase], default=0.0) for phase in ("data", "step"))
        # A single evaluation, perhaps on a slow day, must not leave too little time for steps.
        evaluations = min(self.evaluations_s, MOST_EVALUATIONS * self._limit_s)
        compilation = max(self._recent["first step"], default=0.0) if self._compiling > 0 else 0.0
        reserve = saves + steps + compilation + evaluations + self._waits_s
        return time.monotonic() - self._began + reserve >= self._limit_s
