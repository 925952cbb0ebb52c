"""Cores of this process. Needs no torch: data scripts and their workers start without it."""

from __future__ import annotations

import os


def cores() -> int:
    """Return the number of cores for this process; of the machine if the system has no affinity (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
