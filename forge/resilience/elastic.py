"""Elastic runs: each rank decides whether a stop concerns the whole run, this node or another node.

`scripts/elastic.py` sets FORGE_NODES, e.g. 2:3, in the environment of its ranks.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from forge.resilience.stopping import SIGNALS
from forge.runtime.distributed import gather_from_ranks
from forge.runtime.errors import FINISHED, STOPPED

# All agents notice a joining or leaving node within a fraction of a second of each other.
OWN_SIGNAL_S = 3.0
_SIGNAL_NAMES = {signal.Signals(number).name for number in SIGNALS}


def is_elastic() -> bool:
    """Return whether nodes may join and leave this run."""
    return "FORGE_NODES" in os.environ


def nodes_to_spare() -> int:
    """Return the number of nodes without which the run would continue."""
    least = int(os.environ.get("FORGE_NODES", "0").partition(":")[0])
    return max(int(os.environ.get("GROUP_WORLD_SIZE", "1")) - least, 0) if is_elastic() else 0


def node_of(rank: int) -> int:
    """Return the number of the node of `rank`. torchrun gives every node the same number of consecutive ranks."""
    return rank // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def leave() -> None:
    """Ask this node's agent to leave the run.

    All ranks of the run then save, and the other nodes continue without this node.
    """
    os.kill(os.getppid(), signal.SIGTERM)


def exit_code_after_stop(
    reason: Callable[[], str | None], restarts_left: int, patience_s: float = OWN_SIGNAL_S
) -> int:
    """Return the exit code of a rank after the run has stopped and saved. Collective in an elastic run.

    reason: returns this rank's reason to stop; None if another rank requested the stop. restarts_left: number of restarts
    that the launcher still allows.

    If the launcher has restarts left, the exit code of a planned stop is 0. After any other code the launcher would
    restart the run at once. Job scripts find the reason in status.json.

    In an elastic run, perhaps only some ranks have received a signal. Either only their nodes leave the run, or the
    agents are about to signal all ranks and repeat the rendezvous. A rank without a signal therefore waits up to
    `patience_s` seconds for its agent's signal. If no signal comes, the exit code is 75, so the agent joins the
    rendezvous again.
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
