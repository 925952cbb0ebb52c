"""Where log messages go: rank 0's to the terminal, every rank's to a file of its own."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

# Warns at every redistribution on a mesh of two axes, such as each gradient norm; ours are on purpose.
_NOISY = ("torch.distributed.tensor._redistribute",)


def setup_logging(rank: int, folder: Path) -> None:
    """Send log messages to stderr and to `folder`/rank-R.log. A repeated call replaces the former.

    forge's own messages count from INFO up, all others', Python warnings among them, from WARNING up. On
    stderr rank 0 prints everything, the others only errors, with their rank. A folder that cannot be
    written to costs a warning.
    """
    reset_logging()
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    logging.getLogger("forge").setLevel(logging.INFO)
    _bring_in_torch()
    logging.captureWarnings(True)

    terminal = _Terminal(sys.stderr)
    terminal.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    terminal.setFormatter(_Short(rank))
    root.addHandler(terminal)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _RankFile(folder / f"rank-{rank}.log")
    except OSError as error:
        logging.getLogger(__name__).warning("no log file for rank %d: %s", rank, error)
        return
    line = f"%(asctime)s.%(msecs)03d rank {rank} %(levelname)s %(name)s: %(message)s"
    file.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S"))
    root.addHandler(file)


def reset_logging() -> None:
    """Take away what `setup_logging` added and close the file."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _Terminal | _RankFile):
            root.removeHandler(handler)
            handler.close()
    logging.captureWarnings(False)


class _Terminal(logging.StreamHandler):
    """A type of its own, so that a repeated set-up finds it."""


class _RankFile(logging.FileHandler):
    """Complains of a full disk once, in one line; the standard handler prints a traceback each time."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8")
        self._warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._warned:
            print(f"{self.baseFilename} cannot be written to: {sys.exc_info()[1]}", file=sys.stderr)
        self._warned = True


class _Short(logging.Formatter):
    """`12:03:44 message`, with the level from WARNING up, and with the rank if that is not 0."""

    def __init__(self, rank: int):
        super().__init__(datefmt="%H:%M:%S")
        self._rank = f"rank {rank} " if rank else ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        return f"{self.formatTime(record, self.datefmt)} {self._rank}{level}{record.message}"


def _bring_in_torch() -> None:
    """Let torch's messages pass through our handlers instead of its own, which print on every rank.

    Who sets TORCH_LOGS wants torch's own output and gets it.
    """
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    if "TORCH_LOGS" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        if (name == "torch" or name.startswith("torch.")) and not logger.propagate:
            logger.handlers.clear()
            logger.propagate = True
