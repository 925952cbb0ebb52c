"""Common code of the plot scripts: stack drawings, and write an image. forge/tools/report/draw.py draws the figures."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from forge.runtime.errors import BAD_CONFIG, FINISHED, UserError


def stacked(drawings: Sequence[str]) -> str:
    """Return one SVG document with the drawings stacked vertically. drawings: SVG elements with a viewBox."""
    width, below, parts = 0.0, 0.0, []
    for drawing in drawings:
        match = re.search(r' viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing)
        assert match is not None
        size = f'y="{below:g}" width="{match[1]}" height="{match[2]}"'
        parts.append(drawing[drawing.index("<svg") :].replace("<svg ", f"<svg {size} ", 1))
        width, below = max(width, float(match[1])), below + float(match[2])
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {below}">\n{body}\n</svg>\n'


def write(path: Path, draw: Callable[[], str]) -> int:
    """Write the result of `draw` to `path`. Return FINISHED, or BAD_CONFIG after printing an error."""
    try:
        path.write_text(draw())
        print(f"wrote {path}")
    except (UserError, OSError, ValueError, KeyError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"forge: {reason}", file=sys.stderr)
        return BAD_CONFIG
    return FINISHED
