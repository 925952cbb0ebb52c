"""Shared by the plots: SVG elements of diagrams, and exit codes. Curves are drawn by forge/tools/report/draw.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from forge.runtime.errors import BAD_CONFIG, FINISHED, UserError

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


def stacked(drawings: Sequence[str]) -> str:
    """Write drawings, each an <svg> element with a viewBox, below each other as one."""
    width, below, parts = 0.0, 0.0, []
    for drawing in drawings:
        match = re.search(r' viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing)
        assert match is not None
        size = f'y="{below:g}" width="{match[1]}" height="{match[2]}"'
        parts.append(drawing[drawing.index("<svg") :].replace("<svg ", f"<svg {size} ", 1))
        width, below = max(width, float(match[1])), below + float(match[2])
    return document(width, below, parts)


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
