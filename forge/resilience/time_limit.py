"""Stopping by oneself before somebody else does it, early enough to save."""

from __future__ import annotations

import time
from collections import defaultdict, deque

# Before the first save nobody knows how long one takes; this share of the limit is kept for it.
UNKNOWN_SAVE = 0.05
# The wish to stop is seen by all ranks after one more step, which may be slower than the ones before.
STEPS = 3


class TimeLimit:
    """Of a process that `began` at that time of the monotonic clock, and must have saved and ended `limit_s` later.

    limit_s 0: never. Listens to phases, to know how long steps and evaluations take.
    """

    def __init__(self, limit_s: float, began: float):
        self._limit_s, self._began = limit_s, began
        self._phase, self._since = "", began
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=10))

    def enter(self, phase: str, _step: int) -> None:
        """`phase` begins, the one before has ended."""
        now = time.monotonic()
        self._recent[self._phase].append(now - self._since)
        self._phase, self._since = phase, now

    def near(self, save_s: float) -> bool:
        """Whether it is time to stop, if the slowest save so far took `save_s` seconds (0: there was none)."""
        if not self._limit_s:
            return False
        # At worst one save is under way, which the last one has to wait for.
        saves = 2 * save_s if save_s else UNKNOWN_SAVE * self._limit_s
        steps = STEPS * sum(max(self._recent[phase], default=0.0) for phase in ("data", "step"))
        reserve = saves + steps + max(self._recent["evaluation"], default=0.0)
        return time.monotonic() - self._began + reserve >= self._limit_s
