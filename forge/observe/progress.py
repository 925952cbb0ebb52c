"""Progress on the terminal: the line of a training step, and the progress line of other long work."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any


def format_line(fields: Mapping[str, Any], total_steps: int, eta_s: float | None) -> str:
    """Format a training line of metrics.jsonl for the terminal. Leave out fields that are missing or None.

    fields: as in metrics.jsonl; `mfu` is a fraction, 0 to 1. In the line, `data` is the fraction of the step spent
    waiting for the batch. `gc` is the fraction spent in garbage collection, shown if above 1%.
    """
    width = len(str(total_steps))
    parts = [f"step {fields['step']:>{width}}/{total_steps}"]
    if fields.get("skipped"):
        parts.append("SKIPPED")
    parts += [form(fields[key]) for key, form in _PARTS.items() if fields.get(key) is not None]
    step_time, data_time, gc_time = (fields.get(f"{name}_time_s") for name in ("step", "data", "gc"))
    if step_time and data_time is not None:
        parts.append(f"data {data_time / step_time:.1%}")
    if step_time and gc_time and gc_time > 0.01 * step_time:
        parts.append(f"gc {gc_time / step_time:.1%}")
    if eta_s is not None:
        parts.append(f"eta {format_duration(eta_s)}")
    return "  ".join(parts)


_PARTS = {
    "loss": lambda x: f"loss {x:.3f}",
    "aux_loss": lambda x: f"aux {x:.3g}",
    "grad_norm": lambda x: f"grad {x:.2f}" if x < 1000 else f"grad {x:.2e}",
    "lr": lambda x: f"lr {x:.1e}",
    "tokens_per_second": lambda x: f"{format_count(x)} tok/s",
    "mfu": lambda x: f"mfu {x:.1%}",
    "memory_gib": lambda x: f"mem {x:.1f} GiB",
}


def format_duration(seconds: float) -> str:
    """Return a duration with at most two units: 45s, 3m12s, 2h05m, 3d04h; `?` if not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    return f"{minutes}m{second:02d}s" if minutes else f"{second}s"


def format_count(number: float) -> str:
    """Return a count as text: thousands separators below a million, else three digits and a unit.

    Examples: 8,123, 1.24M, 15.0T.
    """
    if not math.isfinite(number):
        return "?"
    if number < 999_999.5:
        return f"{number:,.0f}"
    for unit in ("M", "B", "T"):
        number /= 1e6 if unit == "M" else 1e3
        if number < 999.5 or unit == "T":
            break
    decimals = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:,.{decimals}f}{unit}"


class StepTimes:
    """Times of steps and of the pauses between them, to estimate the remaining time.

    The estimate uses the mean of the last `window` steps, so slow steps at the start are forgotten. The first step
    compiles and warms up. It counts only until there is a second step. Pauses are evaluations, samples and saves, at
    regular intervals. The mean pause per step is updated only at a long pause. Updates between long pauses would lower
    the mean, as if there were no more long pauses.
    """

    def __init__(self, window: int = 50):
        self._seconds: deque[float] = deque(maxlen=window)
        self._count = 0
        self._paused = self._pause_per_step = 0.0

    def add(self, seconds: float) -> None:
        self._count += 1
        if self._count == 2:
            self._seconds.clear()
        self._seconds.append(seconds)

    def pause(self, seconds: float) -> None:
        """Add a pause of `seconds` seconds between two steps."""
        self._paused += seconds
        # A long pause completes an interval. Between long pauses the mean would fall, as if there were no more pauses.
        if seconds * self._count >= self._paused:
            self._pause_per_step = self._paused / self._count

    def eta(self, remaining_steps: float) -> float | None:
        """Return the estimated seconds for `remaining_steps`, including pauses; None before the first step."""
        if not self._seconds:
            return None
        step = sum(self._seconds) / len(self._seconds)
        return (step + self._pause_per_step) * max(0, remaining_steps)


class ProgressLine:
    """A progress line on stderr with the remaining time: redrawn on a terminal, otherwise written every ten seconds.

    total: amount of work, e.g. in bytes. scale: amount in one displayed `unit`, e.g. 1e6 bytes in an MB.
    """

    def __init__(self, label: str, total: int, unit: str = "MB", scale: float = 1e6):
        self._label, self._total, self._unit, self._scale = label, total, unit, scale
        self._terminal = sys.stderr.isatty()
        self._interval_s = 0.1 if self._terminal else 10.0
        self._began = self._last = time.monotonic()

    def update(self, done: int) -> None:
        """Show the progress. done: finished part of `total`."""
        now = time.monotonic()
        if now - self._last < self._interval_s or not done:
            return
        self._last = now
        rate = done / (now - self._began)
        text = (
            f"{self._label} {done / self._scale:.1f} of {self._total / self._scale:.1f} {self._unit}"
            f" ({100 * done / max(1, self._total):.0f}%), {rate / self._scale:.1f} {self._unit}/s"
            f", eta {format_duration(max(0, self._total - done) / rate)}"
        )
        if self._terminal:
            text = f"\r\033[K{text}"
        print(text, end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def close(self) -> float:
        """Clear the line. Return the seconds since the constructor."""
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        return time.monotonic() - self._began
