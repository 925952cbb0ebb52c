"""Parse the documentation for tests: pages, their code blocks, and the commands of the blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    [*(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md"))]
)
_FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>.+?) -->\s*\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A fenced block. reason: from a comment `<!-- not run: reason -->` above it."""

    language: str
    text: str
    reason: str | None

    def commands(self) -> list[str]:
        """Return the commands, with lines joined at backslashes, without prompts and without a console block's output."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    return [
        Block(match["language"], match["text"], match["reason"])
        for match in _FENCE.finditer(page.read_text("utf-8"))
    ]


def commands(page: Path) -> list[str]:
    """Return the page's commands, without those marked `not run`."""
    typed = [block for block in blocks(page) if block.language in ("bash", "console") and not block.reason]
    return [command for block in typed for command in block.commands()]


def quoted(page: Path) -> list[str]:
    """Return the texts in `backquotes` outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", page.read_text("utf-8")))


def links(page: Path) -> list[str]:
    """Return the targets of the links to files of the repository."""
    text = _FENCE.sub("", page.read_text("utf-8"))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith("http")]
