"""One progress line on stderr, with the time that is left."""

from __future__ import annotations

import sys
import time


class ProgressLine:
    """Redraws one line on a terminal; elsewhere (a log file) writes a line every ten seconds."""

    def __init__(self, label: str, total: int, unit: str = "MB", scale: float = 1e6):
        self._label, self._total, self._unit, self._scale = label, total, unit, scale
        self._begin = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._every = 0.1 if self._terminal else 10.0
        self._last = self._begin

    def update(self, done: int) -> None:
        """`done` of the total are done since this line began."""
        now = time.monotonic()
        if now - self._last < self._every or not done:
            return
        self._last = now
        rate = done / (now - self._begin)
        text = (
            f"{self._label} {done / self._scale:.1f} of {self._total / self._scale:.1f} {self._unit}"
            f" ({100 * done / max(1, self._total):.0f}%), {rate / self._scale:.1f} {self._unit}/s"
            f", ETA {clock(max(0, self._total - done) / rate)}"
        )
        if self._terminal:
            text = f"\r\033[K{text}"
        print(text, end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def close(self) -> float:
        """Clears the line; the seconds since it began."""
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        return time.monotonic() - self._begin


def clock(seconds: float) -> str:
    """62.0 -> "1:02"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
