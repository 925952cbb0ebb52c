"""An append-only file of one JSON object a line, at peace with torn lines and a disk that fills up."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def encode(fields: dict[str, Any]) -> bytes:
    """One JSON object on one line. Floats read back exactly (they are Python's repr); NaN, Inf are null."""
    return json.dumps(_finite(fields), allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


class JsonLines:
    """Appends objects to `path`, opened at the first one; only the first rank has one. When `append` returns, SIGKILL
    loses nothing."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None
        self._unwritten = b""
        self._told = False

    def append(self, **fields: Any) -> None:
        """Write one line. What a full disk refuses is kept, with a warning, and tried again with the next."""
        self._unwritten += encode(fields)
        try:
            descriptor = self._open()
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(descriptor, self._unwritten) :]
            self._told = False
        except OSError as error:
            if not self._told:
                log.warning("cannot write to %s, its lines are kept in memory for now: %s", self.path, error)
            self._told = True

    def close(self) -> None:
        """The next `append` opens the file again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._descriptor).st_size
            if size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n":
                # A killed writer left half a line: ours must not be glued to it.
                self._unwritten = b"\n" + self._unwritten
        return self._descriptor
