"""Rendezvous address under Slurm, a unique name for each start (launch) of a run, and Gloo's network interface."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import time
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from uuid import uuid4

from torch.distributed import Store

from forge.runtime.errors import FAILED, UserError

# Below Linux's range for outgoing connections (32768 to 60999).
FIRST_PORT, END_OF_PORTS = 20000, 32768
# Distance in ports between consecutive jobs; the steps of a job use the ports in between. The distance is coprime to
# the number of ports, so nearby jobs do not share a port.
PORTS_PER_JOB = 17
POLL_S = 0.05
_SIOCGIFADDR = 0x8915  # ioctl of Linux: the IPv4 address of an interface


def slurm_meeting_point(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of the rendezvous for this Slurm step.

    MASTER_ADDR and MASTER_PORT are used if set. Otherwise the host is the step's first node, and the port is derived
    from job and step.
    """
    host = environment.get("MASTER_ADDR") or _first_host(environment)
    if port := environment.get("MASTER_PORT"):
        return host, int(port)
    # A batch script has no step; its first step has number 0.
    job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return host, FIRST_PORT + (PORTS_PER_JOB * job + step) % (END_OF_PORTS - FIRST_PORT)


def _first_host(environment: Mapping[str, str]) -> str:
    """Return the first host of a node list, e.g. `gpu[003-006,9],login1` or `rack[1-2]node[01-16]`."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environment[name] for name in names if environment.get(name)), "")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise UserError(
            "srun set no SLURM_STEP_NODELIST; export MASTER_ADDR and MASTER_PORT and start again."
        )
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def name_start(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Agree on a unique name for this start of the run. Collective, over the store.

    Raises UserError (exit 1) after `timeout`.

    The name is a nonce of rank 0. A store may still hold the nonces of an earlier start, so rank 0 must know
    that all ranks of this start have its nonce. Each rank writes a nonce of its own, and rank 0 repeatedly publishes a
    list of all nonces in the store. A rank that finds its own nonce in the list takes rank 0's nonce from the list, and
    increments a counter named after rank 0's nonce. When all other ranks have done so, rank 0 returns too.
    """
    own, end = uuid4().hex, time.monotonic() + timeout.total_seconds()
    keys = [f"nonce-of-rank-{one}" for one in range(size)]
    store.set(keys[rank], own)
    while time.monotonic() < end:
        if rank == 0:
            store.set("nonces", b" ".join(store.multi_get(keys)).decode())
            if store.add(f"seen-{own}", 0) == size - 1:
                return own
        else:
            nonces = store.get("nonces").decode().split()
            if len(nonces) == size and nonces[rank] == own:
                store.add(f"seen-{nonces[0]}", 1)
                return nonces[0]
        time.sleep(POLL_S)
    raise UserError(
        f"not all of {size} ranks started within {timeout.total_seconds():.0f} s: look at the logs of the missing ranks",
        FAILED,
    )


def choose_gloo_interface(
    store: Store, rank: int, size: int, meeting_host: str, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set GLOO_SOCKET_IFNAME if Gloo would publish an address that other nodes cannot reach.

    Call on every rank. Gloo listens on the address of the node's own name, and e.g. Debian's /etc/hosts maps this name
    to 127.0.1.1. The chosen interface has the route to `meeting_host`. On `meeting_host` itself, it has the route to the
    last rank's node.
    """
    if rank == size - 1:
        store.set("address-of-the-last-rank", _own_address(meeting_host))
    if "GLOO_SOCKET_IFNAME" in environment or not _is_loopback(_address(socket.gethostname())):
        return
    own = _own_address(meeting_host)
    if _is_loopback(own):
        own = _own_address(store.get("address-of-the-last-rank").decode())
    if name := _interface(own):
        environment["GLOO_SOCKET_IFNAME"] = name


def _address(host: str) -> str:
    """Return the IPv4 address of `host`. For an unknown name, return 127.0.0.1 like Gloo."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return "127.0.0.1"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _own_address(peer: str) -> str:
    """Return this node's IPv4 source address for packets to `peer`. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def _interface(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
