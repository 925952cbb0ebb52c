"""Curves, text samples and pictures for TensorBoard: a courtesy, so none of its failures ends a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# A kill loses what is not flushed, and the curves of a resumed run would have a gap there.
_FLUSH_SECONDS = 10


class Board:
    """Context manager that writes below `folder` if `enabled`; on the first rank only.

    What an earlier start of the run wrote about steps after `after_step` is hidden, because it is trained
    again. The writer is made at the first use: importing it is slow. After any failure one warning is logged
    and the board is off.
    """

    def __init__(self, folder: Path, enabled: bool = True, after_step: int = 0):
        self._folder, self._after_step = folder, after_step
        self._off = not enabled
        self._writer: Any = None

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add each value to the curve of its name; None is left out."""
        for tag, value in values.items():
            if value is not None:
                self._try("add_scalar", tag, value, step)

    def text(self, step: int, tag: str, text: str) -> None:
        """Add a text, shown as it is: in a code block, because TensorBoard takes texts for Markdown."""
        block = "\n".join("    " + line for line in text.splitlines())
        self._try("add_text", tag, block, step)

    def image(self, step: int, tag: str, pixels: Any) -> None:
        """Add a picture: uint8 `[height, width, 3]`, red, green, blue."""
        self._try("add_image", tag, pixels, step, None, "HWC")

    def flush(self) -> None:
        """Put everything so far into the file."""
        if self._writer is not None:
            self._try("flush")

    def begin_after(self, step: int) -> None:
        """Hide what has been written about steps after `step`: they are made again."""
        self.close()
        self._after_step = step

    def close(self) -> None:
        """Flush and close; what is written later goes to a new file."""
        if self._writer is not None:
            self._try("close")
        self._writer = None

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try(self, action: str, *arguments: Any) -> None:
        if self._off:
            return
        try:
            if self._writer is None:
                self._writer = self._make_writer()
            getattr(self._writer, action)(*arguments)
        # Whatever it is that a foreign package raises here, training is worth more.
        except Exception as error:
            log.warning("TensorBoard is off from now on: %s: %s", type(error).__name__, error)
            self._off, self._writer = True, None

    def _make_writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        purged = self._after_step + 1
        return SummaryWriter(str(self._folder), purge_step=purged, max_queue=100, flush_secs=_FLUSH_SECONDS)
