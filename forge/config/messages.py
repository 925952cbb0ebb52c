"""From what pydantic found to lines that help: key, value, origin, what is allowed, nearest name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from forge.config.keys import Key, item_class, keys, section_class, sections, similar
from forge.config.schema import Config
from forge.config.section import Section
from forge.config.toml import to_literal
from forge.errors import UserError, nearest

LONGEST_VALUE = 80


class Problem(NamedTuple):
    """`keys[0]` is at fault; the others take part. `text` says what must hold, with numbers and a remedy."""

    keys: tuple[str, ...]
    text: str


class Finding(NamedTuple):
    """One line of an error message, and the path of the key or section that it is about."""

    line: str
    key: tuple[str, ...]
    missing: bool = False


@dataclass
class Values:
    """Raw values as read, before validation, with the place that each came from.

    `origins` maps paths (("train", "steps"), ...) to places. A section made of overrides is from where its
    first key is, a key in a file from where its section is.
    """

    tree: dict[str, Any]
    origins: dict[tuple[str, ...], str] = field(default_factory=dict)
    source: str = ""
    schema: type[Config] = Config

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


def raise_all(lines: list[str]) -> None:
    """Raise UserError with every line; nothing if there is none."""
    if len(lines) == 1:
        raise UserError(lines[0])
    if lines:
        raise UserError("\n  ".join([f"{len(lines)} errors in the configuration:", *lines]))


def divisors(number: int) -> str:
    """All divisors of `number`, for a message."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def multiples(number: int, unit: int) -> str:
    """Those of `unit` next to `number`, below (if positive) and above."""
    lower = number // unit * unit
    return " or ".join(str(n) for n in (lower, lower + unit) if n)


def about(path: tuple[Any, ...], value: Any, origin: str, text: str) -> str:
    """The form of every line: `train.steps = 0 (command line): text`. A long value is cut short."""
    literal = to_literal(value)
    if len(literal) > LONGEST_VALUE:
        literal = literal[: LONGEST_VALUE - 4] + " ..."
    return f"{show(path)} = {literal} ({origin}): {text}"


def show(path: tuple[Any, ...]) -> str:
    """("data", "sources", 0, "path") -> data.sources[0].path"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def findings(error: ValidationError, values: Values) -> list[Finding]:
    """One finding for each key or section that pydantic refused."""
    found: dict[tuple[Any, ...], Finding] = {}
    for item in error.errors(include_url=False):
        path, table, field = _locate(item["loc"], values.schema)
        reason = str(item["ctx"]["error"]) if item["type"] == "value_error" else ""
        if path in found and not reason:
            continue
        value, key = values.at(path), tuple(itertools.takewhile(lambda part: isinstance(part, str), path))
        if item["type"] == "missing" and field is not None and value is None:
            # A table in a list is where it was written; of a section, file and command line may each give a part.
            source = values.source if len(key) == len(path) else values.origin(path[:-1])
            found[path] = Finding(_missing(path, field, source), key, missing=True)
        else:
            text = _unknown(path, table, value) if field is None else _wrong(path, field, value, reason)
            found[path] = Finding(about(path, value, values.origin(path), text), key)
    # A list is refused along with its items; the items say more.
    return [f for path, f in found.items() if not any(o != path and o[: len(path)] == path for o in found)]


def _locate(
    location: tuple[Any, ...], schema: type[Config]
) -> tuple[tuple[Any, ...], type[Section], FieldInfo | None]:
    """Where in the schema an error is: the path down to a key, never into its value; the key's table; its field."""
    table: type[Section] = schema
    path: tuple[Any, ...] = ()
    rest = list(location)
    while True:
        name = rest.pop(0)
        path = (*path, name)
        field = table.model_fields.get(name)
        inner = section_class(field) if field else None
        item = item_class(field) if field else None
        if item and len(rest) > 1:
            path, inner = (*path, rest.pop(0)), item
        if inner is None or not rest:
            return path, table, field
        table = inner


def _missing(path: tuple[Any, ...], field: FieldInfo, source: str) -> str:
    if section := section_class(field):
        needed = ", ".join(name for name, inner in section.model_fields.items() if inner.is_required())
        return f"[{show(path)}]: missing from {source}; needed: {needed}"
    key = Key(show(path), field)
    return f"{key.name}: missing from {source}; needed: {key.allowed} ({key.meaning.rstrip('.')})"


def _wrong(path: tuple[Any, ...], field: FieldInfo, value: Any, reason: str) -> str:
    if section := section_class(field):
        return f"is a section, a table of keys: {', '.join(section.model_fields)}"
    key = Key(show(path), field)
    text = f"allowed: {key.allowed}"
    if isinstance(value, str) and (close := nearest(value, key.choices)):
        text += f"; did you mean {close!r}?"
    if isinstance(value, float) and value.is_integer() and "integer" in key.allowed:
        text += f"; write {int(value)}"
    return f"{text}; {reason}" if reason else text


def _unknown(path: tuple[Any, ...], table: type[Section], value: Any) -> str:
    """Suggests the nearest name in the same table, the section that has the key, or the nearest of all."""
    *parents, name = path
    section, what = show(tuple(parents)), "section" if isinstance(value, Mapping) else "key"
    homes = [key.section for key in keys().values() if key.last == name]
    homes += [known.rpartition(".")[0] for known in sections() if known.endswith(f".{name}")]
    hints = [f"{name} is a key of {' and '.join(f'[{home}]' for home in homes)}"] if homes else []
    if close := nearest(name, table.model_fields):
        hints.append(f"did you mean {section}.{close}?" if section else f"did you mean [{close}]?")
    elif not hints and (others := similar(name)):
        hints.append(f"did you mean {' or '.join(others)}?")
    home = f" in [{section}]" if section else ""
    return f"no such {what}{home}; {'; '.join(hints) or 'there are ' + ', '.join(table.model_fields)}"
