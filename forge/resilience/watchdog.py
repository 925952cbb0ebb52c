"""Watchdog: end a hanging process after writing its stacks.

PyTorch's own timeouts end a waiting collective. They do not detect a sleeping rank, an unresponsive file
system or an endless compilation, and write no stacks. The watchdog's thread knows the current phase of the process and
the phase's time limit. Every rank has a watchdog. If one rank hangs, the others soon wait for it, so all ranks write
their stacks at about the same time.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from forge.config.schema import Resilience
from forge.runtime import compat
from forge.runtime.causes import Cause
from forge.runtime.errors import FAILED, WATCHDOG

log = logging.getLogger(__name__)

# If the interpreter lock is never released, the watchdog's thread cannot run. C code then writes the stacks and ends the
# process, this number of seconds after the time limit.
NET_S = 30.0
# A step may take TIMES_MEDIAN times the median of the last STEPS steps, and at least LEAST_S seconds, because a
# compiler may be running.
TIMES_MEDIAN, LEAST_S, STEPS = 20.0, 300.0, 32
# After this number of failed calls of `alarm` in a row, the rendezvous store counts as lost.
ALARM_TRIES = 3


def bounds(config: Resilience) -> dict[str, tuple[float, str]]:
    """Return a dict from phase to (time limit in seconds, configuration key). A limit of 0 is no limit."""
    keys = {
        "set-up": "setup_timeout_s",
        "first step": "first_step_timeout_s",
        "data": "step_timeout_s",
        "step": "step_timeout_s",
        "evaluation": "evaluate_timeout_s",
        "save": "save_timeout_s",
        "end": "save_timeout_s",
    }
    return {phase: (getattr(config, key), f"resilience.{key}") for phase, key in keys.items()}


def step_bound(configured: float, seconds: Sequence[float]) -> float:
    """Return a step's time limit in seconds; 0: no limit.

    configured: the configured limit; 0: no limit. seconds: durations of earlier steps. The first steps may take as long
    as `configured`. Later steps have a shorter limit, a multiple of the median step, because all GPUs are idle during a
    hang.
    """
    if not configured or len(seconds) < STEPS // 4:
        return configured
    return min(configured, max(LEAST_S, TIMES_MEDIAN * statistics.median(seconds)))


def collective_timeout_s(config: Resilience) -> float:
    """Return the timeout of collectives in seconds, for hangs that the watchdog does not detect.

    The timeout is longer than the limit of every phase. The watchdog thus acts first, and its report has the stacks.
    """
    default = 1800.0
    return max(seconds or default for seconds, _ in bounds(config).values()) + 2 * NET_S


class Alarm(NamedTuple):
    """The reason for ending ranks, and the exit code of these ranks. ranks: the ranks at fault, if known."""

    reason: str
    exit_code: int
    cause: Cause
    ranks: tuple[int, ...] = ()


class Watchdog:
    """Context manager. In its body each phase must end within its bound; otherwise the process exits with code 76.

    bounds: phase -> (seconds, configuration key). A phase not in `bounds`, or with 0 seconds, has no limit. Steps use
    `step_bound`.

    When a bound is exceeded, the watchdog writes to `folder`: `stacks-rank-R.txt` (Python stacks of all threads) and
    `collectives-rank-R` (PyTorch's flight recorder, for `torchfrtrace FOLDER --prefix collectives-rank-`). Then the
    watchdog calls `report(alarm, step)` in a separate thread. `report` may write, or wait for other ranks, for at most
    `grace_s` seconds.

    `alarm()` is called every `alarm_s` seconds. When `alarm` returns an alarm, the watchdog ends the process in the
    same way, with the alarm's exit code. Without `alarm` a rank could wait too long: a collective does not always fail
    after a participant has raised, and ranks waiting for a hanging rank may be in a phase with a longer bound. If
    `alarm` itself raises repeatedly, the process with the rendezvous store is gone. This process then ends too, unless
    it is already in the phase "end".

    `data_waited()` returns the monotonic time at which some rank last waited for data. Meanwhile the other ranks wait in a
    step. So the shorter limit of `step_bound` counts from this time, within the configured limit.
    """

    def __init__(
        self,
        bounds: Mapping[str, tuple[float, str]],
        folder: Path,
        rank: int,
        report: Callable[[Alarm, int], None],
        grace_s: float = 10.0,
        alarm: Callable[[], Alarm | None] | None = None,
        alarm_s: float = 1.0,
        data_waited: Callable[[], float] = lambda: -math.inf,
    ):
        self._data_waited = data_waited
        self._bounds, self._folder, self._rank = bounds, folder, rank
        self._report, self._grace_s = report, grace_s
        self._alarm, self._alarm_s = alarm, alarm_s
        # One tuple, replaced as a whole: phase, step, begin, time limit.
        self._phase = ("", 0, 0.0, math.inf)
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._waits_until = math.inf
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._ending = threading.Lock()
        self._expired = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def enter(self, phase: str, step: int) -> None:
        """Call when `phase` (of `step`) begins and the previous phase has ended."""
        began, (before, _, since, _) = time.monotonic(), self._phase
        if before == "step":
            self._steps.append(began - since)
        if phase == "first step":
            self._steps.clear()  # later steps may be much longer than those before
        seconds = self._bounds.get(phase, (0.0, ""))[0]
        if phase == "step":
            seconds = step_bound(seconds, self._steps)
        self._phase = (phase, step, began, seconds or math.inf)
        if began + (seconds or math.inf) < self._waits_until:
            self._wake.set()

    @property
    def expired(self) -> bool:
        """Return whether the watchdog is ending the process."""
        return self._expired.is_set()

    def wait_for_end(self) -> None:
        """Block forever if the watchdog is ending the process. Otherwise return at once.

        The caller may hold an error that the end of a peer has caused. Without this wait, the error could end the process
        before the watchdog has written its stacks.
        """
        while self.expired:
            time.sleep(1)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        if self._alarm is not None:
            threading.Thread(target=self._listen, name="alarm", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.wait_for_end()
        self._closed.set()
        self._wake.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._closed.is_set():
            phase, step, began, seconds = current = self._phase
            now, deadline = time.monotonic(), began + seconds
            bound, key = self._bounds.get(phase, (0.0, ""))
            if seconds < bound:
                deadline = min(began + bound, max(deadline, self._data_waited() + seconds))
            if now >= deadline:
                limit = f"{key} = {bound:g}"
                if seconds < bound:
                    limit = f"{seconds:.0f} s, from the median of the last steps (at most {limit})"
                what = f"{phase} of step {step}" if step else phase
                reason = f"{what} has taken {now - began:.1f} s; the limit is {limit}"
                return self._end(Alarm(reason, WATCHDOG, Cause.WATCHDOG), step)
            self._waits_until = deadline
            if self._phase is not current:
                continue  # `enter` may have set an earlier deadline after the phase was read, and did not wake this thread
            if deadline < math.inf:
                # Not sys.stderr, which has no file descriptor under a test runner.
                if sys.__stderr__ is not None:
                    seconds = deadline - now + NET_S
                    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
                self._wake.wait(deadline - now)
            else:
                faulthandler.cancel_dump_traceback_later()
                self._wake.wait()
            self._wake.clear()

    def _listen(self) -> None:
        """Call `alarm` repeatedly. Runs in a separate thread, because `alarm` may hang too."""
        assert self._alarm is not None
        failures = 0
        while not self._closed.wait(self._alarm_s):
            try:
                alarm = self._alarm()
                failures = 0
            except Exception as error:
                failures += 1
                if failures < ALARM_TRIES:
                    continue
                if self._phase[0] == "end":
                    return
                reason = f"the process with the rendezvous store is gone: {error}"
                alarm = Alarm(reason, FAILED, Cause.RENDEZVOUS_LOST)
            if alarm is not None and not self._closed.is_set():
                return self._end(alarm, self._phase[1])

    def _end(self, alarm: Alarm, step: int) -> None:
        if not self._ending.acquire(blocking=False):
            return  # the other thread ends the process
        self._expired.set()
        faulthandler.cancel_dump_traceback_later()
        # The hanging resource, e.g. a file system or a lock of logging, may also hang the report.
        reporting = threading.Thread(
            target=self._write_report, args=(alarm, step), name="crash-report", daemon=True
        )
        reporting.start()
        reporting.join(self._grace_s)
        os._exit(alarm.exit_code)

    def _write_report(self, alarm: Alarm, step: int) -> None:
        reason = alarm.reason
        try:
            message = "%s; this process ends. Stacks of all waiting ranks: %s"
            log.error(message, reason, self._folder, extra=alarm.cause.of(*alarm.ranks))
            with open(self._folder / f"stacks-rank-{self._rank}.txt", "w") as file:
                print(f"rank {self._rank}: {reason}\n", file=file, flush=True)
                faulthandler.dump_traceback(file)
            record = compat.flight_record()
            if record is not None:
                (self._folder / f"collectives-rank-{self._rank}").write_bytes(record)
        finally:
            self._report(alarm, step)
