"""Ranks of an elastic run know whether a stop is the run's or another node's.

`scripts/elastic.py` sets FORGE_NODES, such as 2:3, in the environment of the ranks that it starts.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from forge.resilience.stopping import SIGNALS
from forge.runtime.distributed import gather_from_ranks
from forge.runtime.errors import FINISHED, STOPPED

# Agents notice that another node joins or leaves within a fraction of a second of each other.
OWN_SIGNAL_S = 3.0
_SIGNAL_NAMES = {signal.Signals(number).name for number in SIGNALS}


def is_elastic() -> bool:
    """Whether nodes may join and leave this run."""
    return "FORGE_NODES" in os.environ


def may_leave() -> bool:
    """Whether the run would go on without this node."""
    least = int(os.environ.get("FORGE_NODES", "0").partition(":")[0])
    return is_elastic() and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > least


def leave() -> None:
    """Ask this node's agent to end: it stops its ranks, which make all ranks save, and the others go on without it."""
    os.kill(os.getppid(), signal.SIGTERM)


def exit_code_after_stop(
    reason: Callable[[], str | None], restarts_left: int, patience_s: float = OWN_SIGNAL_S
) -> int:
    """Return the exit code of a rank after the run has stopped and saved. Collective in an elastic run.

    reason: why this rank has asked for the stop; None if it has not.

    With restarts left a launcher would start a planned stop again at once, unless the code is 0; job scripts go by
    status.json. In an elastic run a signal to the ranks of some nodes only means that these nodes leave or that all agents
    are about to meet again. A rank without a signal then waits for its agent's, and if none comes ends with 75, so that its
    agent meets the others again.
    """
    code = FINISHED if restarts_left > 0 else STOPPED
    if not is_elastic():
        return code
    reasons = gather_from_ranks("sharing why the run stops", reason)
    if any(one is not None and one not in _SIGNAL_NAMES for one in reasons):
        return code
    if None not in reasons:
        return code
    deadline = time.monotonic() + patience_s
    while reason() is None:
        if time.monotonic() >= deadline:
            return STOPPED
        time.sleep(0.05)
    return code
