"""The live view on a pseudo-terminal: messages above, one view below. Without a terminal: plain lines."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from forge.observe.live import BLOCKS, MOST, Means, TrainingLine, draw_curve
from forge.observe.log import reset_logging, setup_logging

COLUMNS = 60


class Terminal:
    """A pseudo-terminal. stream: the program's end. A thread reads the other end, because a full terminal blocks writers."""

    def __init__(self) -> None:
        self._reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self.stream: TextIO = os.fdopen(writer, "w", encoding="utf-8")
        self._read = b""
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while True:
            try:
                found = os.read(self._reader, 1 << 16)
            except OSError:  # EIO: the program's end is closed
                return
            if not found:
                return
            self._read += found

    def close(self) -> str:
        """Close the program's end and return its output."""
        if not self.stream.closed:
            self.stream.close()
            self._thread.join()
            os.close(self._reader)
        return self._read.decode()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal()
    yield opened
    opened.close()


def screen(text: str) -> list[str]:
    """Return the visible lines after all cursor movements."""
    lines, at = [""], 0
    for piece in re.findall(r"\x1b\[\d*[AJ]|\r?\n|[^\x1b\r\n]+", text):
        if piece.endswith("A") and piece.startswith("\x1b"):
            at -= int(piece[2:-1])
        elif piece == "\x1b[J":
            del lines[at:]
            lines.append("")
        elif piece in ("\n", "\r\n"):
            at += 1
            lines += [""] * (at + 1 - len(lines))
        else:
            lines[at] += piece
    return lines


def report(step: int, loss: float | None) -> None:
    fields = {
        "step": step,
        "loss": loss,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens_per_second": 5000.0,
        "memory_gib": 0.5,
    }
    progress = TrainingLine(fields, 200, eta_s=90.0)
    logging.getLogger("forge.test").info("%s", progress.text(), extra={"progress": progress})


def test_messages_scroll_above_a_redrawn_view(terminal, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    setup_logging(0, tmp_path, live=True)
    try:
        logging.getLogger("forge.test").info("before")
        for step in range(1, 101):
            report(step, 8.0 - step / 20)
            if step == 50:
                logging.getLogger("forge.test").warning("step 50 is a spike")
        report(100, None)
    finally:
        reset_logging()
    seen = screen(terminal.close())
    assert seen[0].endswith("before") and seen[1].endswith("WARNING step 50 is a spike")
    view = seen[2:]
    assert view[0].startswith("    7.9") and view[5].startswith("    3.0")
    assert set("".join(view[:6])) & set(BLOCKS[1:])
    assert view[6].startswith("[####") and view[6].endswith("50.0%")
    assert "step 100/200" in view[7] and "eta 1m30s" in " ".join(view[7:])
    assert sum("eta" in line for line in seen) == 1
    assert all(len(line) < COLUMNS for line in view)
    # The file has every line.
    assert (tmp_path / "rank-0.log").read_text().count("eta 1m30s") == 101


@pytest.mark.parametrize(("live", "rank"), [(False, 0), (True, 1)])
def test_without_the_key_and_on_other_ranks_a_terminal_gets_plain_lines(
    terminal, tmp_path, monkeypatch, live, rank
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    setup_logging(rank, tmp_path, live=live)
    try:
        report(1, 8.0)
        logging.getLogger("forge.test").error("seen")
    finally:
        reset_logging()
    text = terminal.close()
    assert "\x1b" not in text and ("step   1/200" in text) is (rank == 0) and "seen" in text


def test_without_a_terminal_lines_are_plain(tmp_path, capsys) -> None:
    setup_logging(0, tmp_path, live=True)
    try:
        report(1, 8.0)
    finally:
        reset_logging()
    shown = capsys.readouterr().err
    assert "\x1b" not in shown and shown.count("\n") == 1 and "step   1/200  loss 8.000" in shown


def test_a_curve_falls_from_the_top_left_to_the_bottom_right() -> None:
    lines = draw_curve([3.0, 2.0, 1.0], rows=2, columns=40, blocks=BLOCKS)
    assert lines == ["    3.000 █▁ ", "    1.000 ██▁"]
    assert draw_curve([], 2, 40, BLOCKS) == []
    assert len(draw_curve([1.0] * 500, 2, 40, BLOCKS)[0]) == 50


def test_a_curve_of_any_length_is_kept_as_a_few_means() -> None:
    curve = Means()
    for step in range(100_001):
        curve.add(float(step))
    assert MOST // 2 <= len(curve.values) <= MOST
    # Means over 128 steps each, and one over the remainder.
    assert curve.values[0] == 63.5 and curve.values[1] - curve.values[0] == 128.0
    assert curve.values[-1] == pytest.approx((100_000 + 100_000 // 128 * 128) / 2)
    few = Means()
    for loss in (3.0, 2.0, 1.0):
        few.add(loss)
    assert few.values == [3.0, 2.0, 1.0]
