"""The cores that this process may use."""

import os


def cores() -> int:
    """Return the number of cores that this process may run on; of the machine where the system has no affinity (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
