"""Curves, text samples and images for TensorBoard. A TensorBoard failure never ends a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.runtime.causes import Cause

log = logging.getLogger(__name__)

# A kill loses unflushed points, which leaves a gap in the curves of the resumed run.
_FLUSH_SECONDS = 10


class Board:
    """A TensorBoard writer for rank 0, and a context manager that closes it. Writes to `folder` if `enabled`.

    after_step: TensorBoard hides earlier starts' points after this step, because the run repeats the later steps.
    The writer is made at its first use, because its import is slow. After any failure the board is off, with one warning.
    """

    def __init__(self, folder: Path, enabled: bool = True, after_step: int = 0):
        self._folder, self._after_step = folder, after_step
        self._off = not enabled
        self._writer: Any = None

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add each value to the curve of its name, except for values of None."""
        for tag, value in values.items():
            if value is not None:
                self._try("add_scalar", tag, value, step)

    def text(self, step: int, tag: str, text: str) -> None:
        """Add a text as a code block, because TensorBoard would render it as Markdown."""
        block = "\n".join("    " + line for line in text.splitlines())
        self._try("add_text", tag, block, step)

    def image(self, step: int, tag: str, pixels: Any) -> None:
        """Add an image. pixels: uint8 `[height, width, 3]`, in the order red, green, blue."""
        self._try("add_image", tag, pixels, step, None, "HWC")

    def flush(self) -> None:
        """Write all buffered points to the file."""
        if self._writer is not None:
            self._try("flush")

    def discard_after(self, step: int) -> None:
        """Hide all points after `step`, because the run repeats these steps."""
        self.close()
        self._after_step = step

    def close(self) -> None:
        """Flush and close the file. Later points go to a new file."""
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
        # Any exception of the package. Training continues without TensorBoard.
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            log.warning("TensorBoard is off from now on: %s", problem, extra=Cause.SIDE_SYSTEM.mark)
            self._off, self._writer = True, None

    def _make_writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        purged = self._after_step + 1
        return SummaryWriter(str(self._folder), purge_step=purged, max_queue=100, flush_secs=_FLUSH_SECONDS)
