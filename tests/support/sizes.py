"""Count lines and lines of code of forge/ by folder, and of the reading lists in docs/internals/architecture.md.

    python -m tests.support.sizes            forge/ by room, then the reading lists by file
    python -m tests.support.sizes FOLDER     another folder by room

Lines of code exclude blank lines, comments, docstrings and imports.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "architecture.md"
LISTS = ("one process", "several processes", "reports")
MAX_FILE_LINES = 450


class Size(NamedTuple):
    files: int = 0
    lines: int = 0
    code: int = 0

    def __add__(self, other: Size) -> Size:  # type: ignore[override]
        return Size(*(mine + its for mine, its in zip(self, other, strict=True)))


def size_of(path: Path) -> Size:
    text = path.read_text()
    lines = text.splitlines()
    other = {
        number for number, line in enumerate(lines, 1) if not line.strip() or line.lstrip().startswith("#")
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            other |= set(range(node.lineno, node.end_lineno + 1))
    return Size(1, len(lines), len(lines) - len(other))


def _is_docstring(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def by_room(folder: Path) -> dict[str, Size]:
    """Return the size of each folder and file directly in `folder`."""
    rooms: dict[str, Size] = {}
    for path in sorted(folder.rglob("*.py")):
        room = path.relative_to(folder).parts[0]
        rooms[room] = rooms.get(room, Size()) + size_of(path)
    return rooms


def total(sizes: Iterable[Size]) -> Size:
    return sum(sizes, Size())


def reading_list(name: str, page: Path = PAGE) -> set[str]:
    """Return the files, relative to forge/, of the reading list `name` of the architecture page."""
    found = re.search(rf"<!-- {name} -->(.*?)<!-- end -->", page.read_text(), re.S)
    assert found, f"{page} has no list between <!-- {name} --> and <!-- end -->"
    return set(re.findall(r"`forge/([\w/]+\.py)`", found[1]))


def _print(rows: dict[str, Size], title: str) -> None:
    print(f"{title:34} {'files':>5} {'lines':>6} {'code':>6}")
    for name, size in [*rows.items(), ("all", total(rows.values()))]:
        print(f"{name:34} {size.files:5} {size.lines:6} {size.code:6}")


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0]) if arguments else ROOT / "forge"
    _print(by_room(folder), str(folder.name))
    if not arguments:
        for name in LISTS:
            print()
            files = sorted(reading_list(name))
            _print({file: size_of(folder / file) for file in files}, name)


if __name__ == "__main__":
    main(sys.argv[1:])
