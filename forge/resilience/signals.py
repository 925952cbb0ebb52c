"""SIGTERM, SIGINT and SIGUSR1 as a request to stop after a save."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from forge.errors import STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_active: StopSignals | None = None


class StopSignals:
    """Context manager in whose body a signal asks for a stop instead of ending the process. Main thread only.

    The first signal sets `reason`, which the loop takes to all ranks. The second is only remarked upon: a
    save may be running. The third ends the process at once with exit code 75.

    Python runs a signal's handler in the main thread and between two bytecodes, that is not while the main
    thread waits in a collective that hangs. So a second thread, woken by the interpreter's C handler, counts
    signals as well, and it does the exiting.
    """

    def __init__(self, speak: bool = True):
        self.reason: str | None = None
        self._speak = speak
        self._seen = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        global _active
        listening, self._waking = os.pipe()
        os.set_blocking(self._waking, False)
        threading.Thread(target=_exit_at_third, args=(listening,), name="third-signal", daemon=True).start()
        self._previous_wakeup = signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        _active = self
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        _active = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._waking)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # This interrupts any Python code, logging included: no locks here, so no logging.
        self._seen += 1
        name = signal.Signals(number).name
        if self.reason is None:
            self.reason = name
            self._say(f"{name}: stopping after this step, once a checkpoint is saved")
        elif self._seen == 2:
            self._say(
                f"{name}: already stopping, a save may be running; one more signal ends the run at once"
            )

    def _say(self, text: str) -> None:
        if self._speak:
            _to_stderr(f"forge: {text}\n")


def _to_stderr(text: str) -> None:
    # The reader of our stderr may be gone, and an exception here would come up anywhere in the training.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def _hold_back_signals() -> None:
    if _active is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _let_signals_in() -> None:
    if _active is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _restore_in_child() -> None:
    if _active is not None:
        _active.__exit__()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


# A forked helper ends on SIGTERM and never wakes our thread: signals wait until it has restored the handlers.
os.register_at_fork(
    before=_hold_back_signals, after_in_parent=_let_signals_in, after_in_child=_restore_in_child
)


def _exit_at_third(listening: int) -> None:
    """End the process when three of our signals have arrived; return when the pipe's other end is closed."""
    seen = 0
    while numbers := os.read(listening, 64):
        seen += sum(number in SIGNALS for number in numbers)
        if seen >= 3:
            _to_stderr("forge: third signal: leaving at once\n")
            os._exit(STOPPED)
    os.close(listening)
