"""Replace files and folders atomically, lock files, and parse JSON."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Errors of flock on a file system without locks (some Lustre, NFS and FUSE mounts).
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


def replace_atomically(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write `content` to a temporary file, sync it, and rename it to `path`.

    On OSError `path` is unchanged. Without `sync` the function does not wait for the disk. A crash of the node, but not
    of the process, may then leave an empty file.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        if error.errno is None:
            raise
        # The user does not know the temporary name.
        raise OSError(error.errno, error.strerror, str(path)) from error
    if sync:
        sync_folder(path.parent)


@contextmanager
def folder_beside(output: Path) -> Iterator[Path]:
    """Yield a new, empty folder beside `output`. The caller fills it and renames it to `output`.

    At the end, remove the folder unless it was renamed. Its name is random, so two processes may write to one `output`.
    Raises OSError if the folder cannot be made.
    """
    output = output.absolute()
    partial = output.with_name(f"{_partial(output)}{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def leftovers(output: Path) -> list[Path]:
    """Return the folders of `folder_beside` for `output`, of running and of killed processes."""
    return sorted(
        path for path in output.absolute().parent.iterdir() if path.name.startswith(_partial(output))
    )


def _partial(output: Path) -> str:
    return f".partial-{output.absolute().name}-"


def sync_folder(folder: Path) -> None:
    """Sync a rename within `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(text: str | bytes) -> Any:
    """Parse untrusted JSON. Raises ValueError for invalid JSON and for too deep nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file with flock. Return True, or False if the file system has no locks.

    shared: take a shared lock. wait: if another process holds the lock, wait for its release; otherwise raise
    BlockingIOError. Raises OSError if the file cannot be locked.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def why_not_local(path: str) -> str | None:
    """Return why `path` names no folder or file of this machine, as the end of a sentence; None: it names one."""
    if is_url(path):
        return "must be a path on this machine, not a URL"
    if path.partition("/")[0] == "~":
        return "must not begin with ~, which forge does not replace with the home folder"
    return None


def is_url(path: str | Path) -> bool:
    """Return whether `path` is a URL for fsspec: s3://bucket/key, gs://..., https://..."""
    return "://" in str(path)
