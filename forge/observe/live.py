"""Live view of a run on a terminal: loss curve, rates, remaining time, and the latest messages.

The view occupies the last lines of the terminal. Log messages are written above it, and each new training line redraws
the view.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from forge.observe.progress import format_line

ROWS, LEAST_COLUMNS = 6, 40
# Maximum number of points per curve: an even number, larger than any terminal's number of columns.
MOST = 1024
BLOCKS = " ▁▂▃▄▅▆▇█"
PLAIN = " .:-=+*##"
UP_AND_CLEAR = "\033[{}A\033[J"


class TrainingLine(NamedTuple):
    """A training line of the metrics, for the terminal. fields: as in metrics.jsonl."""

    fields: Mapping[str, Any]
    total_steps: int
    eta_s: float | None

    def text(self) -> str:
        return format_line(self.fields, total_steps=self.total_steps, eta_s=self.eta_s)


class Means:
    """A curve of any length, stored as at most MOST means.

    Each mean covers the same number of consecutive values; the last may cover fewer.
    """

    def __init__(self) -> None:
        self._means: list[float] = []
        self._of, self._sum, self._count = 1, 0.0, 0

    def add(self, value: float) -> None:
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._of:
            return
        self._means.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._means) == MOST:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means, self._of = [(first + second) / 2 for first, second in pairs], 2 * self._of

    @property
    def values(self) -> list[float]:
        """Return the means, the oldest first."""
        return [*self._means, self._sum / self._count] if self._count else list(self._means)


class LiveHandler(logging.StreamHandler[TextIO]):
    """A log handler that writes messages to a terminal and keeps the live view below them.

    A log record with a TrainingLine in its attribute `progress` updates the view and is not written as a message.
    """

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self._losses = Means()
        self._progress: TrainingLine | None = None
        self._height = 0
        encoding = (stream.encoding or "").lower().replace("-", "")
        self._blocks = BLOCKS if encoding == "utf8" else PLAIN

    def emit(self, record: logging.LogRecord) -> None:
        progress = getattr(record, "progress", None)
        try:
            if self._height:
                self.stream.write(UP_AND_CLEAR.format(self._height))
                self._height = 0
            if isinstance(progress, TrainingLine):
                self._progress = progress
                loss = progress.fields.get("loss")
                if isinstance(loss, float) and loss == loss and abs(loss) != float("inf"):
                    self._losses.add(loss)
            else:
                self.stream.write(self.format(record) + "\n")
            if self._progress is not None:
                lines = self._view(self._progress, self._columns())
                self.stream.write("\n".join(lines) + "\n")
                self._height = len(lines)
            self.stream.flush()
        except (OSError, ValueError):  # the terminal is gone
            self.handleError(record)

    def _columns(self) -> int:
        try:
            return max(LEAST_COLUMNS, os.get_terminal_size(self.stream.fileno()).columns)
        except (OSError, ValueError):
            return 80

    def _view(self, progress: TrainingLine, columns: int) -> list[str]:
        """Return the lines of the view.

        Each is shorter than the terminal's width `columns`, because the terminal wraps longer lines.
        """
        step, total = progress.fields["step"], progress.total_steps
        width = columns - 1
        share = min(1.0, step / max(1, total))
        room = width - 9
        done = round(share * room)
        bar = f"[{'#' * done}{'-' * (room - done)}] {share:5.1%}"
        words, line = [], ""
        for part in progress.text().split("  "):
            if line and len(line) + len(part) + 2 > width:
                words.append(line)
                line = ""
            line = f"{line}  {part}" if line else part
        curve = draw_curve(self._losses.values, ROWS, width - 10, self._blocks)
        return [line[:width] for line in (*curve, bar, *words, line)]


def draw_curve(values: Sequence[float], rows: int, columns: int, blocks: str) -> list[str]:
    """Return the curve as `rows` lines of text, with its largest and smallest value on the left.

    Without values, return no lines. With more values than columns, each column shows the mean of several values. blocks:
    characters for heights from 0 to a full line.
    """
    if not values:
        return []
    count = min(columns, len(values))
    means = []
    for column in range(count):
        part = values[column * len(values) // count : (column + 1) * len(values) // count]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    steps = rows * (len(blocks) - 1)
    # The smallest height is 1, so the smallest value is visible.
    heights = [1 + round((mean - low) / (high - low or 1.0) * (steps - 1)) for mean in means]
    lines = []
    for row in reversed(range(rows)):
        label = f"{high:9.3f} " if row == rows - 1 else f"{low:9.3f} " if row == 0 else " " * 10
        full = len(blocks) - 1
        lines.append(label + "".join(blocks[min(full, max(0, height - row * full))] for height in heights))
    return lines
