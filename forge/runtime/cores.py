"""The number of cores of this process. Does not import torch, so data scripts and their workers start fast."""

from __future__ import annotations

import os


def cores() -> int:
    """Return the number of cores available to this process.

    Without CPU affinity (macOS), return the node's number of cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
