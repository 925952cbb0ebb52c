"""From what pydantic found to lines that help: key, value, origin, what is allowed, nearest name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from forge.config.keys import Key, item_class, keys, nearest, section_class, sections
from forge.config.schema import Config
from forge.config.section import Section
from forge.config.toml import to_literal
from forge.errors import UserError

LONGEST_VALUE = 80


@dataclass
class Values:
    """Raw values as read, before validation, with the place that each came from.

    `origins` maps paths (("train", "steps"), ...) to places. A section made of overrides is from where its
    first key is, a key in a file from where its section is.
    """

    tree: dict[str, Any]
    origins: dict[tuple[str, ...], str] = field(default_factory=dict)
    source: str = ""

    def at(self, path: tuple[Any, ...]) -> Any:
        """The value at `path`, None where there is none."""
        value: Any = self.tree
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def origin(self, path: tuple[Any, ...]) -> str:
        if self.at(path) is None:
            return "default"
        inner = (key for key in self.origins if key[: len(path)] == path)
        outer = (path[:length] for length in range(len(path), 0, -1))
        return next((self.origins[key] for key in (path, *inner, *outer) if key in self.origins), self.source)


@dataclass(frozen=True)
class Finding:
    """One line of an error message, and the path of the key or section that it is about."""

    line: str
    key: tuple[str, ...]
    missing: bool = False


def raise_all(lines: list[str]) -> None:
    """Raise UserError with every line; nothing if there is none."""
    if len(lines) == 1:
        raise UserError(lines[0])
    if lines:
        raise UserError("\n  ".join([f"{len(lines)} errors in the configuration:", *lines]))


def show(path: tuple[Any, ...]) -> str:
    """("data", "sources", 0, "path") -> data.sources[0].path"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def quote(value: Any) -> str:
    """The value as TOML writes it, cut short if it is long."""
    text = to_literal(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 4] + " ..."


def about(path: tuple[Any, ...], value: Any, origin: str, text: str) -> str:
    """The form of every line: `train.steps = 0 (command line): text`."""
    return f"{show(path)} = {quote(value)} ({origin}): {text}"


def findings(error: ValidationError, values: Values) -> list[Finding]:
    """One finding for each key or section that pydantic refused."""
    found: dict[tuple[Any, ...], Finding] = {}
    for item in error.errors(include_url=False):
        spot = _locate(item["loc"])
        reason = item.get("ctx", {}).get("error", "") if item["type"] == "value_error" else ""
        if spot.path not in found or reason:
            found[spot.path] = _finding(spot, item["type"], str(reason), values)
    # A list is refused along with its items; the items say more.
    return [f for path, f in found.items() if not any(o != path and o[: len(path)] == path for o in found)]


@dataclass(frozen=True)
class _Spot:
    """Where in the schema an error is: the path down to a key, never into its value, and the key's table."""

    path: tuple[Any, ...]
    table: type[Section]
    field: FieldInfo | None

    @property
    def key(self) -> tuple[str, ...]:
        """The path without what is inside a list."""
        return tuple(itertools.takewhile(lambda part: isinstance(part, str), self.path))


def _locate(location: tuple[Any, ...]) -> _Spot:
    table: type[Section] = Config
    path: tuple[Any, ...] = ()
    rest = list(location)
    while True:
        name = rest.pop(0)
        path = (*path, name)
        field = table.model_fields.get(name)
        inner = section_class(field) if field else None
        item = item_class(field) if field else None
        if field and item and len(rest) > 1:
            path, inner = (*path, rest.pop(0)), item
        if inner is None or not rest:
            return _Spot(path, table, field)
        table = inner


def _finding(spot: _Spot, kind: str, reason: str, values: Values) -> Finding:
    value = values.at(spot.path)
    if kind == "missing" and spot.field is not None and value is None:
        return Finding(_missing(spot, values), spot.key, missing=True)
    if spot.field is None:
        text = _unknown(spot, value)
    elif section := section_class(spot.field):
        text = f"is a section, a table of keys: {', '.join(section.model_fields)}"
    else:
        text = "; ".join(part for part in (_wrong(spot, value), reason) if part)
    return Finding(about(spot.path, value, values.origin(spot.path), text), spot.key)


def _missing(spot: _Spot, values: Values) -> str:
    inner = section_class(spot.field) if spot.field else None
    if inner is not None:
        needed = ", ".join(name for name, field in inner.model_fields.items() if field.is_required())
        return f"[{show(spot.path)}]: missing from {values.source}; needed: {needed}"
    key = _key(spot)
    return (
        f"{show(spot.path)}: missing from {values.source}; needed: {key.allowed} ({key.meaning.rstrip('.')})"
    )


def _wrong(spot: _Spot, value: Any) -> str:
    key = _key(spot)
    text = f"allowed: {key.allowed}"
    close = nearest(value, key.choices) if isinstance(value, str) else None
    if close is not None:
        text += f"; did you mean {close!r}?"
    if isinstance(value, float) and value.is_integer() and "integer" in key.allowed:
        text += f"; write {int(value)}"
    return text


def _key(spot: _Spot) -> Key:
    assert spot.field is not None
    return Key(show(spot.path), "", spot.field)


def _unknown(spot: _Spot, value: Any) -> str:
    """Suggests the nearest name in the same table, the section that has the key, or the nearest of all."""
    name, siblings = str(spot.path[-1]), spot.table.model_fields
    what = "section" if isinstance(value, Mapping) else "key"
    table = show(spot.path[:-1])
    close = nearest(name, siblings)
    meant = "" if close is None else f"did you mean {table}.{close}?" if table else f"did you mean [{close}]?"
    hint = "; ".join(part for part in (_elsewhere(name), meant) if part) or _nearest_of_all(name)
    home = f" in [{table}]" if table else ""
    return f"no such {what}{home}; {hint or 'there are ' + ', '.join(siblings)}"


def _elsewhere(name: str) -> str:
    homes = [key.section for key in keys().values() if key.name.endswith(f".{name}")]
    homes += [section.rpartition(".")[0] for section in sections() if section.endswith(f".{name}")]
    return f"{name} is a key of {' and '.join(f'[{home}]' for home in homes)}" if homes else ""


def _nearest_of_all(name: str) -> str:
    close = nearest(name, {key.rpartition(".")[2] for key in keys()})
    return f"did you mean {' or '.join(key for key in keys() if key.endswith(f'.{close}'))}?" if close else ""
