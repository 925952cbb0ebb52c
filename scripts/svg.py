"""Shared by the plots: SVG elements, a chart of curves over optimizer steps, and exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.errors import BAD_CONFIG, FINISHED, UserError

WIDTH, LEFT, RIGHT, TOP = 720, 56, 16, 24
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")


def element(tag: str, text: str = "", **attributes: object) -> str:
    """Write one element; `stroke_width=2` becomes stroke-width="2", and floats get one decimal."""
    shown = {
        name: f"{value:.1f}" if isinstance(value, float) else value for name, value in attributes.items()
    }
    given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in shown.items())
    return f"<{tag}{given}>{text}</{tag}>" if text else f"<{tag}{given}/>"


def label(x: float, y: float, text: object, anchor: str = "start", **attributes: object) -> str:
    return element("text", str(text), x=x, y=y, text_anchor=anchor, **attributes)


def document(width: float, height: float, parts: Sequence[str], font_size: int = 13) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="{font_size}" fill="#333">\n{body}\n</svg>\n'
    )


class Chart:
    """Curves of values `low` to `high` over steps 0 to `last`, `height` pixels high; `parts` are its elements."""

    def __init__(self, title: str, last: int, low: float, high: float, height: float):
        self.last, self.low, self.high, self.height = last, low, high, height
        self.parts = [label(LEFT, 14, title)]
        self._curves = 0
        for value in range(int(low), int(high) + 1):
            self._line(value, stroke="#ddd")
            self.parts.append(label(LEFT - 8, self.y(value) + 4, value, "end"))
        for part in range(5):
            step = round(last * part / 4)
            self.parts.append(label(self.x(step), TOP + height + 18, step, "middle"))

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.last

    def y(self, value: float) -> float:
        return TOP + self.height * (self.high - value) / (self.high - self.low)

    def mark(self, value: float, name: str) -> None:
        """Add a dashed horizontal line."""
        self._line(value, stroke="#888", stroke_dasharray="6 4")
        self.parts.append(label(WIDTH - RIGHT, self.y(value) - 5, name, "end", fill="#666"))

    def curve(self, name: str, points: Sequence[tuple[int, float]]) -> None:
        """Add a curve through (step, value) points; if there are few, also a dot at each."""
        color = COLORS[self._curves % len(COLORS)]
        self._curves += 1
        places = [(self.x(step), self.y(value)) for step, value in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        self.parts.append(element("polyline", points=line, fill="none", stroke=color, stroke_width="1.8"))
        if len(places) < 20:
            self.parts += [element("circle", cx=x, cy=y, r="3.5", fill=color) for x, y in places]
        self.parts.append(label(WIDTH - RIGHT - 8, TOP + 18 * self._curves, name, "end", fill=color))

    def _line(self, value: float, **attributes: str) -> None:
        self.parts.append(element("path", d=f"M{LEFT} {self.y(value):.1f}H{WIDTH - RIGHT}", **attributes))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, without an incomplete last line of a running or killed run."""
    lines = []
    for line in path.read_text("utf-8").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def write(path: Path, draw: Callable[[], str]) -> int:
    """Write the result of `draw` to `path` and return the exit code."""
    try:
        path.write_text(draw())
        print(f"wrote {path}")
    except (UserError, OSError, ValueError, KeyError) as error:
        what = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"forge: {what}", file=sys.stderr)
        return BAD_CONFIG
    return FINISHED
