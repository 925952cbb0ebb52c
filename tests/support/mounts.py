"""Private file systems for a rank, in its own mount namespace. They are invisible outside, and end with the process.

A forked rank calls `small` or `read_only` before anything else. `allowed` returns False if namespaces are forbidden.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from tests.support.harness import start_ranks

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY, _PRIVATE_BELOW = 1, 0x44000


@functools.cache
def allowed() -> bool:
    """Return whether a process on this machine may mount private file systems."""
    return start_ranks(_try, 1).join() == [0]


def _try(rank: int, world: int) -> None:
    try:
        small(Path("/tmp"), 4096)
    except OSError:
        os._exit(1)
    os._exit(0)


def small(folder: Path, size: int) -> None:
    """Mount an empty file system of `size` bytes at `folder`."""
    _new_namespace()
    _mount(folder, 0, f"size={size}")


def read_only(folder: Path) -> None:
    """Mount an empty file system at `folder`, read-only even for root."""
    _new_namespace()
    _mount(folder, _READ_ONLY, "")


def _new_namespace() -> None:
    user, group = os.getuid(), os.getgid()
    _check(_LIBC.unshare(_NEW_MOUNTS | _NEW_USER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _check(_LIBC.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE_BELOW), None))


def _mount(folder: Path, flags: int, options: str) -> None:
    _check(
        _LIBC.mount(b"none", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(flags), options.encode() or None)
    )


def _check(code: int) -> None:
    if code != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
