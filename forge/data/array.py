"""Arrays in files. Local files are memory-mapped, remote files fetched in blocks. Recorded checksums are verified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from forge.data.cache import BlockCache
from forge.runtime.errors import UserError, unreadable
from forge.runtime.remote import BLOCK_BYTES, RemoteFile


class Array(Protocol):
    """A one-dimensional array, indexed by slices, single indices and index arrays. `len` is its length."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice | np.ndarray) -> np.ndarray: ...


class RemoteArray:
    """An `Array` of `count` numbers in a remote file, beginning at byte `offset`. count None: up to the end of the file."""

    def __init__(
        self,
        file: RemoteFile,
        cache: BlockCache,
        dtype: np.dtype,
        offset: int = 0,
        count: int | None = None,
    ):
        self.file, self._cache, self.dtype, self._offset = file, cache, np.dtype(dtype), offset
        self._count = (file.size - offset) // self.dtype.itemsize if count is None else count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            begin, end, step = place.indices(self._count)
            assert step == 1
            return self._read(begin, max(begin, end))
        if isinstance(place, np.ndarray):
            values = [self._read(int(one), int(one) + 1) for one in place]
            return np.concatenate([np.zeros(0, self.dtype), *values])
        return self._read(place, place + 1)[0]

    def _read(self, begin: int, end: int) -> np.ndarray:
        size = self.dtype.itemsize
        first, last = self._offset + begin * size, self._offset + end * size
        pieces = []
        for number in range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES)):
            start = number * BLOCK_BYTES
            pieces.append(self._cache.block(self.file, number)[max(0, first - start) : max(0, last - start)])
        return np.frombuffer(b"".join(pieces), self.dtype)


def map_array(path: str | Path, dtype: np.dtype, offset: int = 0, count: int | None = None) -> np.ndarray:
    """Return an `Array` in a local file, mapped into memory. Raises UserError if the file cannot be read."""
    shape = None if count is None else (count,)
    try:
        return np.memmap(path, dtype, "r", offset, shape).view(np.ndarray)
    except OSError as error:
        raise unreadable(path, error) from None


class CheckedArray:
    """An `Array` in a local file, mapped into memory. The first read of each block verifies its checksum.

    expected: maps a block's index to its checksum. digest: computes the checksum of bytes. checked: whether each block has
    been verified, bool `[blocks]`; changed in place. Reading a changed block raises UserError, naming file and block. Safe
    for concurrent threads.
    """

    def __init__(
        self,
        path: str | Path,
        dtype: np.dtype,
        expected: Callable[[int], bytes],
        digest: Callable[[Any], bytes],
        checked: np.ndarray,
    ):
        self._path, self._expected, self._digest = path, expected, digest
        self._values = map_array(path, dtype)
        self._bytes = self._values.view(np.uint8).data
        self._numbers_per_block = BLOCK_BYTES // self._values.itemsize
        self._is_checked = checked

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, place: Any) -> Any:
        each = self._numbers_per_block
        if isinstance(place, slice):
            begin, end, _ = place.indices(len(self._values))
            blocks: Any = slice(begin // each, -(-end // each))
        else:
            blocks = place // each
        if not np.all(self._is_checked[blocks]):
            for block in np.unique(np.arange(len(self._is_checked))[blocks]).tolist():
                if not self._is_checked[block]:
                    self._check(block)
        return self._values[place]

    def _check(self, block: int) -> None:
        begin = block * BLOCK_BYTES
        data = self._bytes[begin : begin + BLOCK_BYTES]
        if self._digest(data) != self._expected(block):
            raise UserError(
                f"{self._path}: block {block} (bytes {begin} to {begin + len(data) - 1}) does not match its recorded "
                "checksum: the file was changed or is damaged. scripts/verify_data.py lists all such files; restore them, or "
                "prepare the dataset again"
            )
        self._is_checked[block] = True
