"""A bounded disk cache for blocks of remote files, shared by all processes of a node and kept between runs.

    FOLDER/lock, layout.json      the lock of the folder, and its size limit
    FOLDER/.forge-private         marks the folder as private to this user (forge/runtime/private.py)
    FOLDER/0042/KEY-7             block 7 of the file with key KEY, then its CRC-32
    FOLDER/0042/.KEY-7            block 7 while it is fetched, locked by the fetching thread

The numbered folders are sets of equal size. A hash of a block's name selects its set, and a full set evicts one of its
blocks. Processes therefore need no shared counter to respect the limit. A process may die at any point: the kernel
releases its locks, and an incomplete block is fetched again. If the dataset has block checksums, every read from disk
verifies the block's checksum. Blocks of other files are protected only by the CRC-32 and the private folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

import numpy as np

from forge.runtime.causes import Cause
from forge.runtime.errors import UserError
from forge.runtime.files import replace_atomically
from forge.runtime.private import MARKER, PrivateFolder
from forge.runtime.remote import BLOCK_BYTES, RemoteFile

_SET_BLOCKS = 64
_SETS = 4096
_IN_MEMORY = 64  # blocks
_TOUCH_S = 3600.0
_VERSION = 1  # of the layout
_GIB = 16.0  # the limit of a new folder
_SET = re.compile(r"\d{4}")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
NextUse = Callable[[np.ndarray], np.ndarray]
"""Maps block indices in a file, int64 `[n]`, to the time until each block's next use, float64 `[n]`, in any unit."""
log = logging.getLogger(__name__)


def default_folder() -> Path:
    """Return the default of `data.cache_dir`: one folder per user on this node."""
    return Path(tempfile.gettempdir()) / f"forge-cache-{os.geteuid()}"


def _layout(gib: float) -> dict[str, int]:
    """Return the layout of a cache of at most `gib` GiB."""
    blocks = max(1, int(gib * 2**30) // BLOCK_BYTES)
    sets = min(_SETS, -(-blocks // _SET_BLOCKS))
    return {"version": _VERSION, "sets": sets, "blocks_per_set": blocks // sets}


def _read_layout(path: Path) -> dict[str, int] | None:
    """Return the layout of an existing cache; None if there is none, or one of another version."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    is_ours = isinstance(found, dict) and found.keys() == _layout(_GIB).keys()
    return found if is_ours and found["version"] == _VERSION else None


class BlockCache:
    """A cache of blocks in `folder`, of at most `gib` GiB. A fetching thread may use one more block.

    gib: None: the folder's present limit, and 16 for a new folder. Tools use this, so that they keep a run's blocks.

    Safe for threads and processes. Raises UserError if the folder cannot be used, or if another process uses the folder
    with another limit.
    """

    def __init__(self, folder: Path | None = None, gib: float | None = None):
        self.folder = folder or default_folder()
        self.next_uses: dict[str, NextUse] = {}
        """File key -> next uses of the file's blocks. Blocks of files without an entry are evicted first."""
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._memory_lock = threading.Lock()
        self._has_warned, self._touched = False, -inf
        self._private = PrivateFolder(self.folder, "data.cache_dir", _is_unmarked_cache)
        try:
            self._lock = open(self.folder / "lock", "a+")  # noqa: SIM115
            layout = self._take(gib)
        except OSError as error:
            raise UserError(
                f"data.cache_dir {self.folder}: cannot be used: {error.strerror}; name a folder on this machine's disk"
            ) from None

        self._sets, self._set_blocks = layout["sets"], layout["blocks_per_set"]

    def _take(self, gib: float | None) -> dict[str, int]:
        """Lock the folder and return its layout, written to layout.json for a limit of `gib` GiB.

        A folder with another layout is emptied first. If another process uses that folder, raise UserError instead.
        """
        path, layout = self.folder / "layout.json", _layout(_GIB if gib is None else gib)
        with suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = _read_layout(path)
            if there is None or (gib is not None and there != layout):
                self._private.remove(_SET)
                replace_atomically(path, f"{json.dumps(layout)}\n".encode())
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        there = _read_layout(path)
        if gib is None and there is not None:
            return there
        if there != layout:
            limit = _GIB if gib is None else gib
            raise UserError(
                f"data.cache_gib = {limit:g}: another run on this node uses data.cache_dir {self.folder} with another "
                "limit; use the same limit, or another data.cache_dir"
            )
        return layout

    def block(self, file: RemoteFile, number: int) -> bytes:
        """Return block `number` of `file`. The block is fetched once for all processes using the folder."""
        name = f"{file.key}-{number}"
        with self._memory_lock:
            if (data := self._memory.get(name)) is not None:
                self._memory.move_to_end(name)
                return data
        self._touch()
        path = self._path(name)
        data = _load(path, file, number)
        if data is None:
            data = self._fetch(file, number, path)
        with self._memory_lock:
            self._memory[name] = data
            while len(self._memory) > _IN_MEMORY:
                self._memory.popitem(last=False)
        return data

    def _touch(self) -> None:
        """Update the times of the folder's own files, because many systems remove old files from /tmp."""
        if time.monotonic() > self._touched + _TOUCH_S:
            self._touched = time.monotonic()
            for name in (MARKER, "lock", "layout.json"):
                with suppress(OSError):
                    os.utime(self.folder / name)

    def _path(self, name: str) -> Path:
        place = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") % self._sets
        return self.folder / f"{place:04d}" / name

    def _fetch(self, file: RemoteFile, number: int, path: Path) -> bytes:
        try:
            path.parent.mkdir(exist_ok=True)
            with _claim(path) as partial:
                data = _load(path, file, number) if partial is None else None
                if data is None:
                    data = file.fetch(number)
                    if partial is not None:
                        self._store(path, partial, data)
                return data
        except OSError as error:
            if self.folder.is_dir() and error.errno not in _FULL:
                raise
            self._warn(error)
            return file.fetch(number)

    def _store(self, path: Path, partial: int, data: bytes) -> None:
        """Write a block to the file descriptor `partial` and rename it to `path`.

        If the disk is full, warn and drop the block.
        """
        content = data + zlib.crc32(data).to_bytes(4, "little")
        with _locked(path.parent / ".lock"):
            for room in (0, 1):
                try:
                    self._make_room(path.parent, room)
                    os.ftruncate(partial, 0)
                    written = 0
                    while written < len(content):
                        written += os.pwrite(partial, content[written:], written)
                    os.rename(_partial(path), path)
                    return
                except OSError as error:
                    if error.errno not in _FULL:
                        raise
                    os.ftruncate(partial, 0)
                    failed = error
        self._warn(failed)

    def _warn(self, error: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        message = (
            "data.cache_dir %s: %s, although the cache is smaller than data.cache_gib. Blocks that do not fit are fetched at "
            "every use. Make room, or lower data.cache_gib"
        )
        if not self.folder.is_dir():
            message = "data.cache_dir %s: %s. Blocks are fetched at every use until the next start, which makes the folder"
        log.warning(message, self.folder, error.strerror, extra=Cause.NOTE.mark)

    def _make_room(self, folder: Path, more: int) -> None:
        """Evict blocks of the set `folder` until it has room for one more block. `in_order_of_need` orders the blocks.

        more: minimum number of blocks to evict; a set with fewer blocks is emptied.
        """
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
        surplus = len(names) - self._set_blocks + 1
        if more:
            surplus = max(surplus, min(more, len(names)))
        if surplus <= 0:
            return
        for name in self.in_order_of_need(folder, names)[-surplus:]:
            with suppress(FileNotFoundError):
                os.unlink(folder / name)

    def in_order_of_need(self, folder: Path, names: list[str]) -> list[str]:
        """Return `names`, the blocks of set `folder`, sorted by next use, soonest first.

        Blocks of other runs follow. Blocks of equal need, e.g. held-out data, are sorted by age, newest first. Blocks are
        evicted from the end.
        """
        need = np.full(len(names), np.inf)
        of_file: dict[str, list[int]] = {}
        for place, name in enumerate(names):
            of_file.setdefault(name.rpartition("-")[0], []).append(place)
        for key, places in of_file.items():
            if key in self.next_uses:
                blocks = np.array([int(names[place].rpartition("-")[2]) for place in places])
                need[places] = self.next_uses[key](blocks)
        age = np.zeros(len(names))
        for place in np.flatnonzero(np.isinf(need) | (need == 0)).tolist():
            with suppress(FileNotFoundError):
                age[place] = -os.stat(folder / names[place]).st_mtime
        return [names[place] for place in np.lexsort((age, need))]


def _partial(path: Path) -> Path:
    return path.with_name("." + path.name)


@contextmanager
def _claim(path: Path) -> Iterator[int | None]:
    """Claim the right to fetch a block, waiting for other claims.

    Yield the descriptor of the file to write, or None if another thread or process has fetched the block.
    """
    partial = _partial(path)
    while True:
        file = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            # The previous holder may have renamed or removed the file while we waited.
            if not _is_same(file, partial):
                continue
            try:
                # Test under the lock, because the block may have arrived before we made the file.
                yield None if path.exists() else file
            finally:
                if _is_same(file, partial):
                    os.unlink(partial)
            return
        finally:
            os.close(file)


def _is_same(file: int, path: Path) -> bool:
    try:
        return os.fstat(file).st_ino == os.stat(path).st_ino
    except FileNotFoundError:
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_unmarked_cache(folder: Path) -> bool:
    """Return whether `folder` is a block cache of an earlier forge version, which wrote no marker files.

    Such a folder has layout.json, and otherwise only cache files.
    """
    names = [name for name in os.listdir(folder) if name != MARKER]
    try:
        known = set(json.loads((folder / "layout.json").read_bytes())) == {
            "version",
            "sets",
            "blocks_per_set",
        }
    except (OSError, ValueError, TypeError):
        return False
    return known and all(name in ("lock", "layout.json") or _SET.fullmatch(name) for name in names)


def _load(path: Path, file: RemoteFile, number: int) -> bytes | None:
    """Return block `number` of `file` from disk; None if it is missing or damaged. A damaged block is removed."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    data = content[:-4]
    if (
        len(content) > 4
        and zlib.crc32(data).to_bytes(4, "little") == content[-4:]
        and file.is_intact(number, data)
    ):
        return data
    log.warning("the cached block %s is damaged: fetching it again", path, extra=Cause.NOTE.mark)
    path.unlink(missing_ok=True)
    return None
