"""Sign all values in the rendezvous store.

PyTorch unpickles the state in the store. Without signatures, anyone able to write to the store could run code on every node.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from forge.runtime.errors import UserError

VARIABLE = "FORGE_RENDEZVOUS_SECRET"
MIN_LENGTH = 16
_COMMAND = f"export {VARIABLE}=$(openssl rand -hex 32)"
_MAC_BYTES = 32


def read_secret(host: str, port: int, environment: Mapping[str, str] = os.environ) -> bytes:
    """Return a run's secret from the environment variable VARIABLE. host, port: address of the run's rendezvous server.

    If the variable is not set and `host` is a loopback address, read the secret from the private file written by
    `make_local_secret`. Raises UserError (exit 2) if there is no secret, or if the variable's value is too short.
    """
    if secret := environment.get(VARIABLE, ""):
        if len(secret) < MIN_LENGTH:
            raise UserError(
                f"{VARIABLE} has fewer than {MIN_LENGTH} characters; make a longer value: {_COMMAND}"
            )
        return secret.encode()
    if is_loopback(host):
        try:
            return _read_private(_local_file(port))
        except OSError:
            pass
    raise UserError(
        f"{VARIABLE} is not set. `elastic.py meeting` and all agents of a run need the same value. Make one with: {_COMMAND}"
    )


def make_local_secret(port: int) -> bytes:
    """Make a secret for the meeting at `port` of a loopback address. Write it to a file of mode 0600, and return it."""
    path, secret = _local_file(port), secrets.token_hex(32).encode()
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(secret)
    return secret


def is_loopback(host: str) -> bool:
    """Return whether all addresses of `host` are loopback addresses."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[0])).is_loopback for *_, address in found)


def _local_file(port: int) -> Path:
    return Path(tempfile.gettempdir()) / f"forge-meeting-{os.getuid()}-{port}"


def _read_private(path: Path) -> bytes:
    """Return the content of a private file: regular, owned by this user, mode 0600. Raises OSError for other files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} is not a private file of this user (mode 0600); remove it")
        return file.read()


class SignedStore(dist.Store):
    """A view of `store` with signed values: HMAC-SHA256 of key and value under `secret`.

    Reading a value without a valid signature raises UserError. Counters (`add`) have no signature, because the server
    computes them. An older value of the same key has a valid signature. A stranger with write access to the store can thus
    stop a run, but cannot choose a value.

    Keep a reference to this object. A `dist.PrefixStore` around a SignedStore does not keep the Python object alive.
    """

    def __init__(self, store: dist.Store, secret: bytes):
        super().__init__()
        self._store: Any = store  # PyTorch's stubs are incomplete
        self._secret = secret

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._sign(key, value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._verify(key, self._store.get(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        # Empty `expected` means that the key must be missing.
        expected = self._sign(key, expected) if expected else b""
        return self._verify(key, self._store.compare_set(key, expected, self._sign(key, desired)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        own: Any = self
        self._store.wait(list(keys), timeout or own.timeout)

    def _mac(self, key: str, value: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._secret, len(name).to_bytes(8, "big") + name + value, "sha256")

    def _sign(self, key: str, value: str | bytes) -> Any:
        value = value.encode() if isinstance(value, str) else bytes(value)
        return self._mac(key, value) + value

    def _verify(self, key: str, signed: bytes) -> bytes:
        mac, value = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(key, value)):
            raise UserError(
                f"the rendezvous value {key} was rejected, because it is not signed with this run's secret: the "
                f"rendezvous server or an agent was started with another {VARIABLE}, or an outsider can reach the port"
            )
        return value
