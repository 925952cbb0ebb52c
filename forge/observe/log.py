"""Set up logging: rank 0 logs to the terminal, and every rank logs to a file."""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from forge.observe.live import LiveHandler
from forge.runtime.causes import Cause
from forge.runtime.errors import redact
from forge.runtime.terminal import patient

# This logger warns at every redistribution on a 2-D mesh, e.g. for each gradient norm. forge intends these
# redistributions.
_NOISY = "torch.distributed.tensor._redistribute"
_handlers: list[logging.Handler] = []
log = logging.getLogger(__name__)


def setup_logging(rank: int, folder: Path, live: bool = False) -> None:
    """Send log messages to stderr and to `folder`/rank-R.log. A repeated call replaces the earlier set-up.

    forge's own messages are logged from INFO up, other packages' messages and Python's warnings from WARNING up. Rank 0
    prints all of them to stderr; other ranks print only errors, with their rank. A stuck reader of stderr does not
    block this process. One warning is logged if the folder is not writable.

    live: on a terminal, rank 0 keeps a live view below its messages.
    """
    reset_logging()
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("forge").setLevel(logging.INFO)
    _route_torch()
    logging.captureWarnings(True)

    handler: Any = LiveHandler if live and rank == 0 and sys.stderr.isatty() else logging.StreamHandler
    terminal: logging.Handler = handler(patient(sys.stderr))
    terminal.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    terminal.setFormatter(_Short(rank))
    _add(terminal)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _RankFile(folder / f"rank-{rank}.log")
    except OSError as error:
        log.warning("no log file for rank %d: %s", rank, error, extra=Cause.SIDE_SYSTEM.mark)
        return
    file.setFormatter(_Dated(f"%(asctime)s rank {rank} %(levelname)s %(name)s%(mark)s: %(message)s"))
    _add(file)


def reset_logging() -> None:
    """Undo `setup_logging` and close the log file."""
    while _handlers:
        handler = _handlers.pop()
        logging.getLogger().removeHandler(handler)
        handler.close()
    logging.captureWarnings(False)


def _add(handler: logging.Handler) -> None:
    logging.getLogger().addHandler(handler)
    _handlers.append(handler)


class _RankFile(logging.FileHandler):
    """A file handler that reports a full disk once, in one line. The standard handler prints a traceback for each message."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8")
        self._warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._warned:
            patient(sys.stderr).write(f"{self.baseFilename} cannot be written to: {sys.exc_info()[1]}\n")
        self._warned = True


class _Redacting(logging.Formatter):
    """A formatter that redacts secrets in URLs, also in tracebacks and in messages of other packages."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _Dated(_Redacting):
    """A formatter with the local time and its offset from UTC, so logs of different nodes can be compared.

    For programs, the field `mark` holds the record's cause: `[killed]`, or `[killed:2,3]` with ranks; empty without a
    cause.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        cause, ranks = getattr(record, "cause", ""), getattr(record, "ranks", ())
        named = ":" + ",".join(map(str, ranks)) if ranks else ""
        record.mark = f"[{cause}{named}]" if cause else ""
        return super().formatMessage(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


class _Short(_Redacting):
    """A short format: `12:03:44 message`, with the level from WARNING up, and with the rank if not 0.

    The first line of a new day begins with the date.
    """

    def __init__(self, rank: int):
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._rank = f"rank {rank} " if rank else ""
        self._day = time.strftime("%Y-%m-%d")

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        now = self.formatTime(record, self.datefmt)
        before, self._day = self._day, now[:10]
        shown = now if self._day != before else now[11:]
        return f"{shown} {self._rank}{level}{record.message}"


def _route_torch() -> None:
    """Send torch's messages to forge's handlers.

    Removes torch's own handlers, which print on every rank. If TORCH_LOGS is set, torch's handlers stay.
    """
    logging.getLogger(_NOISY).setLevel(logging.ERROR)
    if "TORCH_LOGS" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        if (name == "torch" or name.startswith("torch.")) and not logger.propagate:
            logger.handlers.clear()
            logger.propagate = True
