"""The directory of one run: where everything lies in it, and the lock that keeps a second run out."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import tempfile
import time
import weakref
from pathlib import Path

from forge.errors import UserError
from forge.observe.json_lines import utc_now

log = logging.getLogger(__name__)

# What flock says on a file system that has no locks (some Lustre and FUSE mounts).
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
# Rather more than the disk would put into the inode itself, so that a full disk is noticed.
_PROBE_BYTES = 64 * 1024

_held: weakref.WeakSet[RunDirectory] = weakref.WeakSet()


class RunDirectory:
    """Paths of a run below `root`. Every rank has one; rank 0 calls `acquire`, the others may `find` what it did."""

    def __init__(self, root: Path):
        self.root = root
        self.config = root / "config.toml"
        self.status = root / "status.json"
        self.metrics = root / "metrics.jsonl"
        self.events = root / "events.jsonl"
        self.rollbacks = root / "rollbacks.json"
        self.tensorboard = root / "tensorboard"
        self.checkpoints = root / "checkpoints"
        self.logs = root / "logs"
        self.profile = root / "profile"
        self._lock_path = root / ".lock"
        self._descriptor: int | None = None

    def acquire(self, patience_s: float = 2.0) -> str:
        """Make the folders, see that they can be written to, and lock the directory; returns what `find` looks for.

        The lock lasts until `release`, until this object is collected, or to the end of the process, even by
        SIGKILL. It waits `patience_s` seconds for a holder that was killed just now and is not quite gone.

        Raises UserError (exit 2) when a folder cannot be written to or another run holds the directory.
        """
        for folder in (self.root, self.tensorboard, self.checkpoints, self.logs):
            _require_writable(folder)
        try:
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"{self._lock_path} cannot be opened ({error.strerror}); is {self.root} another user's run?"
            ) from error
        try:
            self._lock(descriptor, patience_s)
        except BaseException:
            os.close(descriptor)
            raise
        if stale := _holder(descriptor):
            log.warning("%s: taking over from %s, which ended without giving the lock back", self.root, stale)
        holder = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": utc_now()})
        _rewrite(descriptor, holder.encode())
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, _let_go, descriptor)
        _held.add(self)
        return holder

    def find(self, holder: str) -> None:
        """On another node: see that this is the directory that `acquire` returned `holder` for, and can be written to.

        Raises UserError (exit 2).
        """
        try:
            seen = self._lock_path.read_text()
        except OSError:
            seen = ""
        if seen != holder:
            raise UserError(
                f"{self.root} on {socket.gethostname()} is another folder than on {json.loads(holder)['host']}; "
                "point run.output_dir at a file system that all nodes share."
            )
        for folder in (self.checkpoints, self.logs):
            _require_writable(folder)

    def release(self) -> None:
        """Give the directory back. Does nothing if it is not held."""
        if self._descriptor is not None:
            self._descriptor = None
            self._finalizer()

    def _lock(self, descriptor: int, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    who = _holder(descriptor) or "another process"
                    raise UserError(
                        f"{self.root} is in use by {who}; wait for that run, stop it, or choose another run.name."
                    ) from None
                time.sleep(0.05)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise UserError(f"{self._lock_path} cannot be locked: {error.strerror}.") from error
                log.warning(
                    "%s: its file system has no locks; a second run there would go unnoticed", self.root
                )
                return

    def _forget(self) -> None:
        """In a forked child: close its copy of the descriptor, which would hold the lock after our death."""
        if self._descriptor is not None:
            self._finalizer.detach()
            os.close(self._descriptor)
            self._descriptor = None


def _forget_in_child() -> None:
    for directory in list(_held):
        directory._forget()
    _held.clear()


# O_CLOEXEC keeps the descriptor out of programs that we start; this keeps it out of plain forks.
os.register_at_fork(after_in_child=_forget_in_child)


def _require_writable(folder: Path) -> None:
    """Make `folder` and write to it for a try; the file has no name, so that none is left behind."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written to ({error.strerror}); "
            "point run.output_dir at a folder that you may write to and that has room."
        ) from error


def _holder(descriptor: int) -> str | None:
    """The last holder, as it wrote itself down; None if it gave the directory back, or has not yet written."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']} since {holder['started']}"
    except (ValueError, KeyError, TypeError):
        return None


def _rewrite(descriptor: int, content: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)
    os.fsync(descriptor)  # or a network file system keeps it to this node


def _let_go(descriptor: int) -> None:
    try:
        _rewrite(descriptor, b"")
    finally:
        os.close(descriptor)
