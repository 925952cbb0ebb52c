"""Parts of a page, sections of figures and tables, and their HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Protocol

# Rows of the table beside a figure: enough to read the course of a curve off it.
ROWS = 12


class Part(Protocol):
    """A part of a section: a table, a figure, a list of findings."""

    def html(self) -> str:
        """Return the part as HTML."""


@dataclass(frozen=True)
class Table:
    """A table. header: names of the columns. rows: cells as text, or numbers; the first cell of each row names the row."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def html(self) -> str:
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.header)
        body = "".join(self._row(row) for row in self.rows)
        caption = f"<caption>{escape(self.caption)}</caption>"
        table = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.caption)}">{table}</div>'

    def _row(self, row: Sequence[Any]) -> str:
        first, *others = row
        cells = "".join(
            f'<td class="number">{shown(cell)}</td>'
            if _is_number(cell)
            else f"<td>{escape(shown(cell))}</td>"
            for cell in others
        )
        return f'<tr><th scope="row">{escape(shown(first))}</th>{cells}</tr>'


@dataclass(frozen=True)
class Picture:
    """A drawing with its caption, and its numbers as a table."""

    caption: str
    svg: str
    table: Table
    wide: bool = False

    def html(self) -> str:
        label = escape(self.caption)
        drawing = self.svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
        return (
            f'<figure class="{"wide" if self.wide else "half"}"><figcaption>{label}</figcaption>{drawing}'
            f"<details><summary>The numbers</summary>{self.table.html()}</details></figure>"
        )


@dataclass(frozen=True)
class TextBlock:
    """Preformatted text, e.g. a model's sample."""

    caption: str
    text: str

    def html(self) -> str:
        return f"<figure class='wide'><figcaption>{escape(self.caption)}</figcaption><pre>{escape(self.text)}</pre></figure>"


@dataclass(frozen=True)
class Findings:
    """Sentences, the most important first."""

    sentences: Sequence[str]

    def html(self) -> str:
        if not self.sentences:
            return "<p>Nothing in these files stands out.</p>"
        return f'<ul class="findings">{"".join(f"<li>{escape(one)}</li>" for one in self.sentences)}</ul>'


@dataclass
class PageSection:
    """A numbered heading of the page, a sentence below it, and its parts in order."""

    title: str
    intro: str = ""
    parts: list[Part] = field(default_factory=list)

    def html(self, number: int) -> str:
        intro = f"<p>{escape(self.intro)}</p>" if self.intro else ""
        inner = "".join(part.html() for part in self.parts)
        return (
            f'<section aria-labelledby="s{number}"><h2 id="s{number}">{escape(self.title)}</h2>{intro}'
            f'<div class="parts">{inner}</div></section>'
        )


def shown(value: Any) -> str:
    """Return a cell as text. Numbers that are not integers have four digits."""
    if value is None:
        return ""
    if _is_number(value):
        if isinstance(value, int) or (abs(value) < 1e15 and value == int(value)):
            return f"{int(value):,}"
        return f"{value:.4g}" if math.isfinite(value) else "not finite"
    return str(value)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (isinstance(value, int) or math.isfinite(value))
    )


def sampled(items: Sequence[Any], count: int = ROWS) -> list[Any]:
    """Return at most `count` evenly spread items, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
