"""metrics.jsonl and events.jsonl: append-only files with one JSON object per line. Robust to torn lines and full disks."""

from __future__ import annotations

import json
import logging
import math
import os
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge.runtime.causes import Cause
from forge.runtime.errors import redact
from forge.runtime.files import replace_atomically

log = logging.getLogger(__name__)


def utc_now() -> str:
    """Return the current time in ISO 8601, UTC, in milliseconds: 2025-06-01T12:00:00.123+00:00."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def encode(fields: dict[str, Any]) -> bytes:
    """Return `fields` as a JSON object on one line. Floats read back exactly (Python's repr); NaN and Inf become null."""
    return redact(json.dumps(finite(fields), allow_nan=False)).encode() + b"\n"


def finite(value: Any) -> Any:
    """Return the JSON value with NaN and Inf replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def read_lines(path: Path, needed: str) -> list[dict[str, Any]]:
    """Return the objects with the key `needed` in a .jsonl file. Lines torn by a kill are skipped."""
    lines = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            fields = json.loads(line)
            if isinstance(fields, dict) and needed in fields:
                lines.append(fields)
    return lines


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a .json file; an empty dict if the file cannot be read."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text("utf-8"))
        if isinstance(found, dict):
            return found
    return {}


class JsonLines:
    """Appends objects to the file `path`, which the first append opens. After `append` returns, SIGKILL loses no lines."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None
        self._unwritten = b""
        self._warned = False

    def append(self, **fields: Any) -> None:
        """Write one line with the object `fields`.

        If the disk is full, warn, and write the line together with the next one.
        """
        self._unwritten += encode(fields)
        try:
            descriptor = self._open()
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(descriptor, self._unwritten) :]
            self._warned = False
        except OSError as error:
            if not self._warned:
                message = "cannot write to %s: %s. New lines stay in memory until the file is writable again"
                log.warning(message, self.path, error, extra=Cause.NOT_WRITTEN.mark)
            self._warned = True

    def sync(self) -> None:
        """Sync all lines to disk. A crash of the node then loses none. A failure is logged."""
        try:
            os.fsync(self._open())
        except OSError as error:
            log.warning(
                "cannot sync %s to disk, so its last lines may be lost if the node crashes: %s",
                self.path,
                error,
                extra=Cause.NOT_WRITTEN.mark,
            )

    def close(self) -> None:
        """Close the file. The next `append` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._descriptor).st_size
            last = os.pread(self._descriptor, 1, size - 1) if size > 0 else b"\n"
            if last == b"\0":
                _log_zeros(self.path)
            if last != b"\n":
                # A killed process left an incomplete line. The next line must not continue it.
                self._unwritten = b"\n" + self._unwritten
        return self._descriptor

    def cut(self, after_step: int, aside: bool = False) -> Path | None:
        """Drop all lines with a `step` greater than `after_step`, so that a resumed run writes no step twice.

        Also drop torn and unreadable lines, and lines still waiting for room on the disk. The new file replaces the old
        file atomically. With `aside`, keep the old file and return its new name; otherwise return None.
        """
        self.close()
        written = self.path.read_bytes() if self.path.exists() else b""
        if written.endswith(b"\0"):
            _log_zeros(self.path)
        lines = (written + self._unwritten).splitlines(keepends=True)
        content = b"".join(
            line for number, line in enumerate(lines, 1) if self._keeps(line, number, after_step)
        )
        kept = None
        if content != written:
            kept = self._copy(written) if aside else None
            replace_atomically(self.path, content)
        self._unwritten = b""
        return kept

    def _copy(self, content: bytes) -> Path:
        """Write `content` to `.aside-NAME`, or to `.aside-NAME.k` if the name is taken. Return the path."""
        first = path = self.path.with_name(f".aside-{self.path.name}")
        taken = 0
        while path.exists():
            taken += 1
            path = first.with_name(f"{first.name}.{taken}")
        replace_atomically(path, content)
        log.warning(
            "removed lines from %s; its former content is kept in %s",
            self.path.name,
            path,
            extra=Cause.SET_ASIDE.mark,
        )
        return path

    def _keeps(self, line: bytes, number: int, after_step: int) -> bool:
        if not line.endswith(b"\n"):
            return False  # torn, even if the rest of the line happens to be JSON
        try:
            return json.loads(line)["step"] <= after_step
        except (ValueError, KeyError, TypeError):
            message = "%s: line %d is not a metrics line and is dropped"
            log.warning(message, self.path, number, extra=Cause.LINES_LOST.mark)
            return False


def warn_of_gap(path: Path, step: int, interval: int, origin: int = 0) -> None:
    """Warn about missing training lines if the file's last line is more than `interval` steps before `step`.

    interval: the configured number of steps between lines. If two of the last ten lines are further apart, their
    distance is used instead. origin: the step at which the history began; earlier steps need no lines.
    """
    steps = [origin, *(line["step"] for line in read_lines(path, "loss") if line["step"] > origin)]
    usual = max([interval, *(later - earlier for earlier, later in pairwise(steps[-11:]))])
    # Step 1 always has a line.
    if steps[-1] + usual < step or (steps == [0] and step > 1):
        message = "%s lacks the training lines of steps %d to %d after a crash or an edit; the checkpoint is complete"
        log.warning(message, path, steps[-1] + 1, step, extra=Cause.LINES_LOST.mark)


def _log_zeros(path: Path) -> None:
    message = "%s ends in zero bytes, left by a crash of the machine or its file system; they are dropped"
    log.warning(message, path, extra=Cause.LINES_LOST.mark)
