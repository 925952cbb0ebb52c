"""Explain values refused by the schema: allowed values, the nearest name, and the origin of the value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from forge.config.keys import (
    describe,
    item_class,
    keys,
    literals,
    members,
    section_class,
    sections,
    value_at,
)
from forge.config.problem import KeyPath, Problem, show
from forge.config.schema import Config
from forge.config.section import Section
from forge.runtime.errors import nearest


@dataclass
class Values:
    """Unvalidated values and their origins.

    tree: nested tables. source: name of the file that was read. overridden: paths set on the command line. derived:
    path -> origin of values computed from another key. schema: the schema for validation.
    """

    tree: dict[str, Any]
    source: str = ""
    overridden: set[KeyPath] = field(default_factory=set)
    derived: dict[KeyPath, str] = field(default_factory=dict)
    schema: type[Config] = Config

    def origin(self, path: KeyPath) -> str:
        """Return the origin of the value at `path`: "default", "command line", another key, or a file and its section."""
        value = value_at(self.tree, path)
        if value is None:
            return "default"
        if path in self.derived:
            return self.derived[path]
        if any(path[:length] in self.overridden for length in range(1, len(path) + 1)):
            return "command line"
        section = key_path(path if isinstance(value, dict) else path[:-1])
        return f"{self.source} [{'.'.join(section)}]" if section else self.source

    def problem(self, path: KeyPath, allowed: str, remedy: str = "") -> Problem:
        """Return a `Problem` about the value at `path`, with its origin."""
        value = value_at(self.tree, path)
        return Problem(path, allowed, remedy, value=value, source=self.origin(path))


def key_path(path: KeyPath) -> KeyPath:
    """Return the part of `path` before its first list index."""
    return path[: next((i for i, part in enumerate(path) if isinstance(part, int)), len(path))]


def explain(error: ValidationError, values: Values) -> dict[KeyPath, Problem | None]:
    """Return path -> problem for each key or section refused by pydantic.

    The problem is None for a required key that is missing because no file is given.
    """
    problems: dict[KeyPath, Problem | None] = {}
    for item in error.errors(include_url=False):
        path, table, field = _locate(item["loc"], values.schema)
        reason = str(item["ctx"]["error"]) if item["type"] == "value_error" else ""
        if path in problems and not reason:
            continue
        value = value_at(values.tree, path)
        if field is None:
            problems[path] = values.problem(path, *_unknown(path, table, value))
        elif value is None:
            problems[path] = _missing(path, field, values)
        else:
            problems[path] = values.problem(path, *_wrong(path, field, value, reason))
    # pydantic refuses a list together with its items. Keep the problems of the items, which are more precise.
    return {
        path: problem
        for path, problem in problems.items()
        if not any(other != path and other[: len(path)] == path for other in problems)
    }


def _locate(location: KeyPath, table: type[Section]) -> tuple[KeyPath, type[Section], FieldInfo | None]:
    """Return (path of the invalid key, its section class, its field). The field of an unknown key is None.

    location: pydantic's path of the error. It may lead into a value, e.g. to an item of a list. The returned path ends
    at the key.
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


def _missing(path: KeyPath, field: FieldInfo, values: Values) -> Problem | None:
    # A section may come partly from the file and partly from the command line. A table in a list comes from only one of
    # them.
    in_list = len(key_path(path)) < len(path)
    source = values.origin(path[:-1]) if in_list else values.source
    if not source:
        return None
    if section := section_class(field):
        needed = ", ".join(name for name, inner in section.model_fields.items() if inner.is_required())
        return Problem((f"[{show(path)}]",), f"missing from {source}", f"needed: {needed}")
    key = describe(show(path), field)
    return Problem(path, f"missing from {source}", f"needed: {key.allowed} ({key.meaning.rstrip('.')})")


def _wrong(path: KeyPath, field: FieldInfo, value: Any, reason: str) -> tuple[str, str]:
    """Return the allowed values and the remedy for a refused value. reason: the message of forge's own validator, or ""."""
    if section := section_class(field):
        return f"must be a section, a table with the keys {', '.join(section.model_fields)}", ""
    allowed, remedies = describe(show(path), field).allowed, []
    names = [name for name in literals(field.annotation) if isinstance(name, str)]
    if isinstance(value, str) and (close := nearest(value, names)):
        remedies.append(f'did you mean "{close}"?')
    if isinstance(value, float) and value.is_integer() and int in members(field.annotation):
        remedies.append(f"write {int(value)}")
    if value in ("True", "False") and bool in members(field.annotation):
        remedies.append(f"write {value.lower()}")
    return f"allowed: {allowed}", "; ".join([*remedies, *([reason] if reason else [])])


def _unknown(path: KeyPath, table: type[Section], value: Any) -> tuple[str, str]:
    """Return the complaint about an unknown key, and a hint: the sections with this key, or the nearest name."""
    *parents, name = path
    section, kind = show(parents), "section" if isinstance(value, dict) else "key"
    homes = [full.rpartition(".")[0] for full in (*keys(), *sections()) if full.endswith(f".{name}")]
    hints = [f"{name} is a key of {' and '.join(f'[{home}]' for home in homes)}"] if homes else []
    if close := nearest(name, table.model_fields):
        hints.append(f"did you mean {section}.{close}?" if section else f"did you mean [{close}]?")
    elif not homes and (close := nearest(name, {key.last for key in keys().values()})):
        hints.append(f"did you mean {' or '.join(key.name for key in keys().values() if key.last == close)}?")
    home = f" in [{section}]" if section else ""
    known = f"{'its keys' if section else 'the sections'} are {', '.join(table.model_fields)}"
    return f"no such {kind}{home}", "; ".join(hints) or known
