"""The agents' rendezvous server: a small process that outlives every node of a run, and the clock of all nodes.

PyTorch's rendezvous keeps its state in one store. By default the first node's agent holds the store, so the state is
lost with that agent. `Meeting` holds the store in a separate process. It also publishes its time in the store: agents
detect dead agents by time stamps, and the clocks of machines may differ.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from forge.runtime.errors import UserError
from forge.tools.elastic.secret import VARIABLE, SignedStore, is_loopback, make_local_secret, read_secret

CLOCK, OVER = "forge/clock", "forge/over"
TICK_S = 0.5
# After the run has ended, agents of spare nodes still read the closed rendezvous.
LINGER_S = 15.0


class Meeting:
    """The store of one run, at the address of `host` and at `port` (0: a free one). `serve` returns when the run is over.

    Raises UserError if this machine does not have that address, or the port is taken, or there is no secret.
    """

    def __init__(self, port: int, host: str = "localhost"):
        self.is_local = is_loopback(host)
        own = self.is_local and VARIABLE not in os.environ
        secret = b"" if own else read_secret(host, port)
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(address[:2], family=family)
        except OSError as error:
            raise UserError(f"meeting --host {host} --port {port}: {error.strerror}") from None
        self.host, self.port = listening.getsockname()[:2]
        if own:
            secret = make_local_secret(self.port)
        # The store would listen on all addresses by itself.
        server = dist.TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._store = SignedStore(server, secret)

    def read(self, key: str) -> bytes:
        """Return the agents' value of `key`."""
        return self._store.get(key)

    def serve(self, closed: threading.Event, linger_s: float = LINGER_S) -> None:
        """Publish the clock until `closed` is set, or until `linger_s` seconds after an agent reported the run's end."""
        while not is_over(self._store):
            self._store.set(CLOCK, repr(time.time()))
            if closed.wait(TICK_S):
                return
        closed.wait(linger_s)


def is_over(store: dist.Store) -> bool:
    """Return whether an agent has reported the end of the run. A report without a valid signature does not count."""
    try:
        return store.check([OVER]) and bool(store.get(OVER))
    except UserError:
        return False


def clock_offset(store: dist.Store) -> float:
    """Return the meeting's clock minus this machine's, in seconds, to within a tenth of a second."""
    store.set_timeout(timedelta(seconds=60))
    before = store.get(CLOCK)
    while (now := store.get(CLOCK)) == before:
        time.sleep(0.01)
    return float(now) - time.time()
