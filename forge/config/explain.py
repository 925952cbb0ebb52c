"""Error lines that help: the key, its value and where it came from, what is allowed, the nearest name, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from forge.config.keys import (
    describe,
    item_class,
    keys,
    literals,
    section_class,
    sections,
    to_literal,
    value_at,
)
from forge.config.schema import Config
from forge.config.section import Section
from forge.runtime.errors import UserError, nearest

LONGEST_VALUE = 80
# The path of a key or section: ("data", "sources", 0, "path") is data.sources[0].path.
KeyPath = tuple[Any, ...]


@dataclass
class Values:
    """Values as read, before validation, and where they came from: the file `source`, or an override."""

    tree: dict[str, Any]
    source: str = ""
    overridden: set[KeyPath] = field(default_factory=set)
    schema: type[Config] = Config

    def origin(self, path: KeyPath) -> str:
        """Return where the value at `path` came from: "default", "command line", or a file and its section."""
        value = value_at(self.tree, path)
        if value is None:
            return "default"
        if any(path[:length] in self.overridden for length in range(1, len(path) + 1)):
            return "command line"
        section = key_path(path if isinstance(value, dict) else path[:-1])
        return f"{self.source} [{'.'.join(section)}]" if section else self.source

    def line(self, path: KeyPath, text: str) -> str:
        """Return an error line about the value at `path`."""
        return about(path, value_at(self.tree, path), text, self.origin(path))


def raise_all(lines: list[str]) -> None:
    """Raise UserError with every line; do nothing if there is none."""
    if len(lines) == 1:
        raise UserError(lines[0])
    if lines:
        raise UserError("\n  ".join([f"{len(lines)} errors in the configuration:", *lines]))


def about(path: KeyPath, value: Any, text: str, origin: str = "") -> str:
    """Return the line `train.steps = 0 (command line): text`. A long value is truncated."""
    literal = to_literal(value)
    if len(literal) > LONGEST_VALUE:
        literal = literal[: LONGEST_VALUE - 4] + " ..."
    return f"{show(path)} = {literal}{f' ({origin})' if origin else ''}: {text}"


def about_problem(problem: str, config: Config, values: Values | None = None) -> str:
    """Return the line for a problem that a check found, a sentence that begins with the key at fault."""
    key, _, text = problem.partition(" ")
    path = tuple(key.split("."))
    value = value_at(config.model_dump(mode="json"), path)
    return about(path, value, text, values.origin(path) if values else "")


def show(path: Sequence[Any]) -> str:
    """Write ("data", "sources", 0, "path") as data.sources[0].path."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def key_path(path: KeyPath) -> KeyPath:
    """Return `path` up to the first list index."""
    return path[: next((i for i, part in enumerate(path) if isinstance(part, int)), len(path))]


def explain(error: ValidationError, values: Values) -> dict[KeyPath, str]:
    """Return path -> one line for each key or section that pydantic refused; "" for a missing key if there is no file."""
    lines: dict[KeyPath, str] = {}
    for item in error.errors(include_url=False):
        path, table, field = _locate(item["loc"], values.schema)
        reason = str(item["ctx"]["error"]) if item["type"] == "value_error" else ""
        if path in lines and not reason:
            continue
        value = value_at(values.tree, path)
        if field is not None and value is None:
            lines[path] = _missing(path, field, values)
        else:
            text = _unknown(path, table, value) if field is None else _wrong(path, field, value, reason)
            lines[path] = values.line(path, text)
    # A list is refused together with its items; the lines about the items are more precise.
    return {
        path: line
        for path, line in lines.items()
        if not any(other != path and other[: len(path)] == path for other in lines)
    }


def _locate(location: KeyPath, table: type[Section]) -> tuple[KeyPath, type[Section], FieldInfo | None]:
    """Return the path of the key that an error is about (not of a part of its value), its table and its field.

    `table` is the schema. The field of an unknown key is None.
    """
    for depth, part in enumerate(location, start=1):
        if isinstance(part, int):
            continue
        field = table.model_fields.get(part)
        inner = (section_class(field) or item_class(field)) if field else None
        names_follow = any(isinstance(later, str) for later in location[depth:])
        if inner is None or not names_follow:
            break
        table = inner
    return location[:depth], table, field


def _missing(path: KeyPath, field: FieldInfo, values: Values) -> str:
    # Both the file and the command line may give a part of a section; a table in a list comes from one of them.
    in_list = len(key_path(path)) < len(path)
    source = values.origin(path[:-1]) if in_list else values.source
    if not source:
        return ""
    if section := section_class(field):
        needed = ", ".join(name for name, inner in section.model_fields.items() if inner.is_required())
        return f"[{show(path)}]: missing from {source}; needed: {needed}"
    key = describe(show(path), field)
    return f"{key.name}: missing from {source}; needed: {key.allowed} ({key.meaning.rstrip('.')})"


def _wrong(path: KeyPath, field: FieldInfo, value: Any, reason: str) -> str:
    if section := section_class(field):
        return f"must be a section, a table with the keys {', '.join(section.model_fields)}"
    text = f"allowed: {describe(show(path), field).allowed}"
    names = [name for name in literals(field.annotation) if isinstance(name, str)]
    if isinstance(value, str) and (close := nearest(value, names)):
        text += f'; did you mean "{close}"?'
    if isinstance(value, float) and value.is_integer() and "integer" in text:
        text += f"; write {int(value)}"
    if value in ("True", "False") and "true or false" in text:
        text += f"; write {value.lower()}"
    return f"{text}; {reason}" if reason else text


def _unknown(path: KeyPath, table: type[Section], value: Any) -> str:
    """Suggest the nearest name in the same table, the section that has the key, or the nearest of all."""
    *parents, name = path
    section, kind = show(parents), "section" if isinstance(value, dict) else "key"
    homes = [full.rpartition(".")[0] for full in (*keys(), *sections()) if full.endswith(f".{name}")]
    hints = [f"{name} is a key of {' and '.join(f'[{home}]' for home in homes)}"] if homes else []
    if close := nearest(name, table.model_fields):
        hints.append(f"did you mean {section}.{close}?" if section else f"did you mean [{close}]?")
    elif not homes and (close := nearest(name, {key.last for key in keys().values()})):
        hints.append(f"did you mean {' or '.join(key.name for key in keys().values() if key.last == close)}?")
    home = f" in [{section}]" if section else ""
    return f"no such {kind}{home}; {'; '.join(hints) or 'there are ' + ', '.join(table.model_fields)}"
