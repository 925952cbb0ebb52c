"""Common code of the plot scripts: stack drawings, and write an image. forge/tools/report/draw.py draws the figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from forge.runtime.errors import UserError
from forge.runtime.files import replace_atomically
from scripts.options import exit_code_of, require_output


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
    """Write the result of `draw` to `path` and return the exit code. `draw` may raise ValueError for wrong input."""

    def work() -> None:
        require_output(path)
        try:
            image = draw()
        except ValueError as error:
            raise UserError(str(error)) from error
        replace_atomically(path, image.encode())
        print(f"wrote {path}")

    return exit_code_of(work)
