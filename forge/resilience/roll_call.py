"""Finding out, once something has gone wrong, which rank did not live to tell.

A rank that dies takes all others with it: their collectives fail or hang, and each tells of a lost connection and none
of the cause. So every rank that still can says so in the store through which the ranks met.
"""

from __future__ import annotations

import time

from torch.distributed import Store


class RollCall:
    """One per rank, over a `store` that no other thread uses. `name` is new at every start of the run."""

    def __init__(self, store: Store, rank: int, world: int, name: str):
        self._store, self._rank, self._world, self._name = store, rank, world, name

    def answer(self, trouble: str) -> str:
        """Say that this rank lives and what its trouble is. Returns the trouble of the rank that answered first."""
        first = self._store.compare_set(f"{self._name}/first", "", f"rank {self._rank}: {trouble}")
        self._store.set(f"{self._name}/{self._rank}", "here")
        return first.decode()

    def raise_alarm(self, reason: str) -> None:
        """Let every rank end for this reason."""
        self._store.compare_set(f"{self._name}/alarm", "", reason)

    def alarm(self) -> str | None:
        """The reason of the first rank that has raised an alarm."""
        key = f"{self._name}/alarm"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def missing(self, patience_s: float, quiet_s: float = 1.0) -> list[int]:
        """Ranks that have not answered after `patience_s` seconds, or once nobody new has answered for `quiet_s`."""
        missing = [rank for rank in range(self._world) if rank != self._rank]
        now = time.monotonic()
        end, quiet_until = now + patience_s, now + quiet_s
        while missing and time.monotonic() < min(end, quiet_until):
            time.sleep(0.05)
            still = [rank for rank in missing if not self._store.check([f"{self._name}/{rank}"])]
            if len(still) < len(missing):
                missing, quiet_until = still, time.monotonic() + quiet_s
        return missing
