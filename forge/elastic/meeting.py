"""The place where agents meet: a small process that outlives every node of a run, and the clock that all nodes share.

PyTorch's rendezvous keeps its state in one store, which by default lives in the agent of the first node and is lost with
it. `Meeting` holds that store in a process of its own. It also publishes its time there: agents take each other for dead by
time stamps, and the clocks of machines may be apart.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

CLOCK, OVER = "forge/clock", "forge/over"
TICK_S = 0.5
# After the run is over, agents of spare nodes still have to read that the rendezvous is closed.
LINGER_S = 15.0


class Meeting:
    """The store of one run at `port` of this machine (0: a free one). `serve` returns when the run is over."""

    def __init__(self, port: int):
        self._store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        self.address = f"{socket.gethostname()}:{self._store.port}"
        self.port = self._store.port

    def read(self, key: str) -> bytes:
        """Return what agents have written under `key`."""
        return self._store.get(key)

    def serve(self, closed: threading.Event, linger_s: float = LINGER_S) -> None:
        """Keep the clock until an agent reports the end of the run and `linger_s` seconds have passed, or until `closed`."""
        while not self._store.check([OVER]):
            self._store.set(CLOCK, repr(time.time()))
            if closed.wait(TICK_S):
                return
        closed.wait(linger_s)


def clock_offset(store: dist.Store) -> float:
    """Return how many seconds the clock of the meeting is ahead of this machine's, to within a tenth of a second."""
    store.set_timeout(timedelta(seconds=60))
    before = store.get(CLOCK)
    while (now := store.get(CLOCK)) == before:
        time.sleep(0.01)
    return float(now) - time.time()
