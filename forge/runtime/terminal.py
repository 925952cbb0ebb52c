"""Write to stderr without waiting for its reader.

If the reader of a pipe hangs, the pipe fills up and the next write blocks forever: the process would neither train nor
stop. O_NONBLOCK does not help, because other processes share the pipe. A separate thread therefore writes.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import unicodedata
from collections import deque
from typing import TextIO

from forge.runtime.errors import FAILED, UserError, storage_cause

# Seconds until the reader counts as stuck, and the maximum number of texts kept until it reads again.
PATIENCE_S, MOST = 1.0, 1000


class PatientStream:
    """A text stream on a file descriptor. `write` returns when the text is written, or after PATIENCE_S seconds.

    While the reader is stuck, texts are kept in memory and `write` returns at once. Texts beyond MOST are dropped. When the
    reader reads again, a line reports the number of dropped lines. Errors of the descriptor are ignored, because the
    reader may no longer exist.
    """

    def __init__(self, descriptor: int, encoding: str = "utf-8"):
        self.encoding = encoding
        self._descriptor = descriptor
        self._restart()
        os.register_at_fork(after_in_child=self._restart)

    def _restart(self) -> None:
        """Reset the state. Also called in a forked child, which does not inherit its parent's thread."""
        self._changed = threading.Condition()
        self._texts: deque[str] = deque()
        self._thread: threading.Thread | None = None
        self._stuck, self._dropped = False, 0

    def write(self, text: str) -> int:
        with self._changed:
            if len(self._texts) >= MOST:
                self._dropped += max(1, text.count("\n"))
                return len(text)
            self._texts.append(text)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="stderr", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            if not self._stuck:
                self._stuck = not self._changed.wait_for(lambda: not self._texts, PATIENCE_S)
        return len(text)

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts)
                content = self._texts[0].encode(self.encoding, "backslashreplace")
            while content:
                try:
                    content = content[os.write(self._descriptor, content) :]
                except BlockingIOError:  # another process has set O_NONBLOCK
                    select.select([], [self._descriptor], [])
                except OSError:
                    break
            with self._changed:
                self._texts.popleft()
                if not self._texts and self._dropped:
                    lines = f"{self._dropped} lines" if self._dropped > 1 else "1 line"
                    self._texts.append(f"forge: {lines} dropped here: nobody read stderr\n")
                    self._dropped = 0
                self._stuck = self._stuck and bool(self._texts)
                self._changed.notify_all()


stderr = PatientStream(2)


def patient(stream: TextIO | None) -> TextIO | PatientStream:
    """Return a stream that writes to `stream` (None: stderr) without waiting for its reader.

    A stream without a file descriptor is returned unchanged.
    """
    if stream is None:
        return stderr
    try:
        descriptor = stream.fileno()
    except OSError:
        return stream
    return stderr if descriptor == 2 else PatientStream(descriptor, stream.encoding)


def print_result(text: str) -> None:
    """Print `text` to stdout. A closed pipe, e.g. of `| head`, is no error. Raises UserError (exit 1) for a full disk."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise UserError(
            f"stdout: cannot be written: {error.strerror}", FAILED, storage_cause(error)
        ) from None


# Characters that reorder the text around them.
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str, keep: str = "") -> str:
    """Return `text` with control characters, direction marks and lone surrogates escaped.

    keep: characters not to escape.
    """
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in keep
        and (character in _DIRECTIONS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"))
        else character
        for character in text
    )
