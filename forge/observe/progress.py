"""The one line that a person watches: where the run stands, how fast it goes and when it ends."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any


def format_line(fields: Mapping[str, Any], total_steps: int, eta_s: float | None) -> str:
    """One readable line from the fields of a metrics.jsonl training line; what is absent or None is left out.

    `mfu` is a fraction of one; `data` is the share of the step that was spent waiting for the batch, and `gc` what
    garbage collection took relative to the step, shown from 1% up.
    """
    width = len(str(total_steps))
    parts = [f"step {fields['step']:>{width}}/{total_steps}"]
    if fields.get("skipped"):
        parts.append("SKIPPED")
    for key, form in _PARTS:
        if fields.get(key) is not None:
            parts.append(form(fields[key]))
    step_time, data_time = fields.get("step_time_s"), fields.get("data_time_s")
    if step_time and data_time is not None:
        parts.append(f"data {data_time / step_time:.1%}")
    gc_time = fields.get("gc_time_s")
    if step_time and gc_time and gc_time > 0.01 * step_time:
        parts.append(f"gc {gc_time / step_time:.1%}")
    if eta_s is not None:
        parts.append(f"eta {format_duration(eta_s)}")
    return "  ".join(parts)


_PARTS = [
    ("loss", lambda x: f"loss {x:.3f}"),
    ("aux_loss", lambda x: f"aux {x:.3g}"),
    ("grad_norm", lambda x: f"grad {x:.2f}" if x < 1000 else f"grad {x:.2e}"),
    ("lr", lambda x: f"lr {x:.1e}"),
    ("tokens_per_second", lambda x: f"{format_count(x)} tok/s"),
    ("mfu", lambda x: f"mfu {x:.1%}"),
    ("memory_gib", lambda x: f"mem {x:.1f} GiB"),
]


def format_duration(seconds: float) -> str:
    """Two units at most: 45s, 3m12s, 2h05m, 3d04h; `?` if not finite."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    if minutes:
        return f"{minutes}m{second:02d}s"
    return f"{second}s"


def format_count(number: float) -> str:
    """Whole with thousands marks below a million, then three digits and a unit: 8,123 or 1.24M or 15.0T."""
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
    """How long recent steps took, to say how long the rest will.

    The mean of the last `window` steps, so that an early slow stretch is forgotten; and without the run's
    first step, which compiles and warms up, as soon as there is another.
    """

    def __init__(self, window: int = 50):
        self._seconds: deque[float] = deque(maxlen=window)
        self._count = 0

    def add(self, seconds: float) -> None:
        self._count += 1
        if self._count == 2:
            self._seconds.clear()
        self._seconds.append(seconds)

    def eta(self, remaining_steps: int) -> float | None:
        """Seconds that `remaining_steps` will take; None before the first step."""
        if not self._seconds:
            return None
        return sum(self._seconds) / len(self._seconds) * max(0, remaining_steps)
