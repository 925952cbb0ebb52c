"""`Meeting`: the rendezvous server of an elastic run, a small process that outlives all its nodes.

PyTorch's rendezvous keeps its state in one store. By default the first node's agent serves the store, and the state is
lost with this agent. `Meeting` serves the store from a separate process. `Meeting` also publishes its time in the store
as a common clock. Agents need a common clock, because they detect dead agents by time stamps, and the clocks of
machines may differ.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from forge.runtime.errors import UserError
from forge.tools.elastic.secret import VARIABLE, SignedStore, is_loopback, make_local_secret, read_secret

CLOCK, LAUNCH, OVER = "forge/clock", "forge/launch", "forge/over"
TICK_S = 0.5
# Seconds of service after the end of the run, for agents of spare nodes still reading the closed rendezvous.
LINGER_S = 15.0


class Meeting:
    """The rendezvous store of one run, served at `host`:`port`. Port 0: any free port.

    Call `serve`, which returns when the run is over. The constructor raises UserError if `host` is not an address of this
    machine, the port is taken, or there is no secret.
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
        # Pass a listening socket. Without it, the store would listen on all addresses.
        server = dist.TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._store = SignedStore(server, secret)
        self._store.set(LAUNCH, secrets.token_hex(8))

    def read(self, key: str) -> bytes:
        """Return the value of `key` in the store. Raises UserError if its signature is invalid."""
        return self._store.get(key)

    def serve(self, closed: threading.Event, linger_s: float = LINGER_S) -> None:
        """Publish the clock every TICK_S seconds until an agent reports the end of the run, then wait `linger_s` seconds.

        Return at once when `closed` is set.
        """
        while not is_over(self._store):
            self._store.set(CLOCK, repr(time.time()))
            if closed.wait(TICK_S):
                return
        closed.wait(linger_s)


def is_over(store: dist.Store) -> bool:
    """Return whether an agent has reported the end of the run, with a valid signature."""
    try:
        return store.check([OVER]) and bool(store.get(OVER))
    except UserError:
        return False


def clock_offset(store: dist.Store) -> float:
    """Return the meeting's clock minus this machine's clock, in seconds, with an error below 0.1 s.

    Waits for the next update of the meeting's clock. After the end of the run, the clock stands still and the result is 0.
    Raises DistError if the meeting does not answer.
    """
    store.set_timeout(timedelta(seconds=60))
    before = store.get(CLOCK)
    while (now := store.get(CLOCK)) == before:
        if is_over(store):
            return 0.0
        time.sleep(0.01)
    return float(now) - time.time()
