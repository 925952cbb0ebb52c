"""The run directory: its paths, and the lock against a second run."""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge.observe.json_lines import utc_now
from forge.runtime.causes import Cause
from forge.runtime.errors import FAILED, STOPPED, UserError, is_wrong_path, storage_cause
from forge.runtime.files import lock

log = logging.getLogger(__name__)

# Larger than data stored in the inode itself, so a full disk is detected.
_PROBE_BYTES = 64 * 1024

# Seconds to wait for another holder of the lock, and for a rank of an earlier start of the same job: NFS notices the
# death of a node after about 90 s.
PATIENCE_S, LOST_RANK_S = 2.0, 180.0

_held: weakref.WeakSet[RunDirectory] = weakref.WeakSet()


class RunDirectory:
    """The run directory `root`, with the paths inside it. Rank 0 calls `acquire`. Then ranks on other nodes call `find`."""

    def __init__(self, root: Path):
        self.root = root
        self.config = root / "config.toml"
        self.status = root / "status.json"
        self.metrics = root / "metrics.jsonl"
        self.events = root / "events.jsonl"
        self.rollbacks = root / "rollbacks.json"
        self.origin = root / "origin.json"
        self.tensorboard = root / "tensorboard"
        self.checkpoints = root / "checkpoints"
        self.logs = root / "logs"
        self.profile = root / "profile"
        self._lock_path = root / ".lock"
        self._descriptor: int | None = None

    def acquire(self, launch: Sequence[str] = (), restarted: bool = False) -> str:
        """Make the folders, check that they are writable, and lock the directory.

        Return a description of this process, for `find` on other nodes. The lock is held until `release`, until this object
        is garbage-collected, or until the process ends, even by SIGKILL. Waits PATIENCE_S for another holder, which may just
        have been killed. launch: the identities of this launch. restarted: this start is a restart of the launch. If the
        holder then belongs to this launch, it is a rank of an earlier start, perhaps on a lost node, and the wait is
        LOST_RANK_S.

        Raises UserError if a folder is not writable or another run holds the lock (exit 2), if the file system failed (exit
        1), or if a rank of an earlier start still holds the lock (exit 75: a job script may try again).
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
            self._lock(descriptor, launch if restarted else ())
        except BaseException:
            os.close(descriptor)
            raise
        if stale := _holder(descriptor):
            message = "%s: taking over the stale lock of %s"
            log.warning(message, self.root, stale, extra=Cause.NOTE.mark)
        holder = json.dumps(
            {"host": socket.gethostname(), "pid": os.getpid(), "started": utc_now(), "launch": list(launch)}
        )
        _rewrite(descriptor, holder.encode())
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, _release, descriptor)
        _held.add(self)
        return holder

    def find(self, holder: str) -> None:
        """Check, on another node, that `holder` has locked this directory, and that the directory is writable.

        holder: the result of `acquire`. Raises UserError if either check fails.
        """
        try:
            seen = self._lock_path.read_text()
        except OSError:
            seen = ""
        if seen != holder:
            raise UserError(
                f"{self.root} on {socket.gethostname()} and on {json.loads(holder)['host']} are "
                "different folders; point run.output_dir at a file system that all nodes share."
            )
        for folder in (self.checkpoints, self.logs):
            _require_writable(folder)

    def holder(self) -> str | None:
        """Return a description of the process that holds the lock.

        None: the lock is free, or the file system has no locks.
        """
        try:
            descriptor = os.open(self._lock_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            lock(descriptor, shared=True)
        except BlockingIOError:
            return _holder(descriptor) or "another process"
        except OSError:
            pass
        finally:
            os.close(descriptor)
        return None

    def release(self) -> None:
        """Release the lock, if held."""
        if self._descriptor is not None:
            self._descriptor = None
            self._finalizer()

    def _lock(self, descriptor: int, restarts: Sequence[str]) -> None:
        began, reported = time.monotonic(), False
        while True:
            try:
                if not lock(descriptor):
                    message = "%s: its file system has no locks; a second run there would go unnoticed"
                    log.warning(message, self.root, extra=Cause.NOTE.mark)
                return
            except BlockingIOError:
                waited_s, who = time.monotonic() - began, _holder(descriptor) or "another process"
                own = not set(restarts).isdisjoint(_record(descriptor).get("launch", ()))
                if waited_s >= PATIENCE_S and not own:
                    raise UserError(
                        f"{self.root} is in use by {who}; wait for that run, stop it, or choose another run.name."
                    ) from None
                if waited_s >= LOST_RANK_S:
                    raise UserError(
                        f"{self.root} is still in use by {who}, a rank of an earlier start of this job; end that process",
                        STOPPED,
                    ) from None
                if waited_s >= PATIENCE_S and not reported:
                    message = "%s: waiting until %s, a rank of an earlier start of this job, ends"
                    log.warning(message, self.root, who, extra=Cause.NOTE.mark)
                    reported = True
                time.sleep(0.05)
            except OSError as error:
                raise UserError(f"{self._lock_path} cannot be locked: {error.strerror}.") from error


def _close_in_child() -> None:
    """Close a forked child's copies of the lock descriptors, which would keep the locks after the parent's death."""
    for directory in list(_held):
        if directory._descriptor is not None:
            directory._finalizer.detach()
            os.close(directory._descriptor)
            directory._descriptor = None
    _held.clear()


# O_CLOEXEC closes the descriptor in started programs; this hook closes it in forked processes.
os.register_at_fork(after_in_child=_close_in_child)


def _require_writable(folder: Path) -> None:
    """Make `folder` and write a probe to it. Raises UserError if either fails.

    The probe file has no name, so none is left behind.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        if is_wrong_path(error):
            raise UserError(
                f"{folder} cannot be written to ({error.strerror}); point run.output_dir at a writable folder"
            ) from error
        raise UserError(
            f"{folder} cannot be written to ({error.strerror}); free space or repair the file system, then start the run "
            "again. A new run.output_dir would begin a new run",
            FAILED,
            storage_cause(error),
        ) from error


def _holder(descriptor: int) -> str | None:
    """Return the last holder's description of itself; None if it released the lock or has not written yet."""
    holder = _record(descriptor)
    try:
        return f"process {holder['pid']} on {holder['host']} since {holder['started']}"
    except KeyError:
        return None


def _record(descriptor: int) -> dict[str, Any]:
    """Return the content of the lock file; empty if it has none or is invalid."""
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _rewrite(descriptor: int, content: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)
    os.fsync(descriptor)  # otherwise a network file system may keep the content on this node


def _release(descriptor: int) -> None:
    try:
        _rewrite(descriptor, b"")
    finally:
        os.close(descriptor)
