"""Fault injection: make one rank fail at a named point of one step, to prove that the run survives.

The environment variable is `FORGE_FAULT=point:step:rank[:action]`; `*` as step or rank means every step or rank.
Without the variable, fault injection is off. Actions: `kill` (default) sends SIGKILL to this process. `raise` raises
OSError(ENOSPC), like a full disk. `sleep` or `sleep=SECONDS` (default: an hour) sleeps. `signal` or `signal=NAME`
(default: SIGTERM) sends a signal to this process. After a restart by torchrun, fault injection is off; otherwise the
run could never pass the point.

Points:

    set-up               every rank, once the run directory is locked, before anything is read or built; step 0
    step                 every rank, with the step's batch, before any computation
    evaluation           every rank, before the first batch of an evaluation after that step
    save.begin           every rank, before anything is copied or written
    save.between_shards  every rank, after its own shard file is on disk, before rank 0 writes the index
    local.before_manifest every rank, after the files of a node-local state, with peers' copies, are on all nodes
    save.before_manifest rank 0, after every file except the manifest is on disk
    save.before_rename   rank 0, after the partial folder is complete and before its final name
    save.before_prune    rank 0, after the new checkpoint is complete and before old ones are removed
    save.during_prune    rank 0, after an old checkpoint has lost its manifest and nothing else
    mirror.restore       rank 0, after the manifest of a copy of that step has been fetched and nothing else
"""

from __future__ import annotations

import errno
import os
import signal
import time
from functools import cache


@cache
def _fault() -> tuple[str, str, str, str] | None:
    text = os.environ.get("FORGE_FAULT")
    if not text or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return None
    point, step, rank, *action = text.split(":")
    return point, step, rank, action[0] if action else "kill"


def fault_point(name: str, step: int) -> None:
    """Fail if `FORGE_FAULT` names this point, step and rank (`RANK` in the environment, or 0)."""
    fault = _fault()
    if fault is None or fault[0] != name:
        return
    if fault[1] not in ("*", str(step)) or fault[2] not in ("*", os.environ.get("RANK", "0")):
        return
    action, _, detail = fault[3].partition("=")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "raise":
        raise OSError(errno.ENOSPC, f"injected by FORGE_FAULT at {name}")
    elif action == "sleep":
        time.sleep(float(detail or 3600))
    elif action == "signal":
        os.kill(os.getpid(), signal.Signals[detail or "SIGTERM"])
    else:
        raise ValueError(f"FORGE_FAULT action {action!r}: expected kill, raise, sleep or signal")
