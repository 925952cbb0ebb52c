"""All keys with types, defaults and meanings, read off the schema: what help, docs and messages share."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, reduce
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from forge.config.schema import Config
from forge.config.section import Phrase, Section
from forge.config.toml import to_literal
from forge.errors import nearest

BOUNDS = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}


@dataclass(frozen=True)
class Key:
    """One key; `name` is dotted: "model.moe.top_k" is the key `last` = "top_k" of `section` "model.moe"."""

    name: str
    field: FieldInfo

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def allowed(self) -> str:
        return allowed(self.field.annotation, self.field.metadata)

    @property
    def default(self) -> str:
        """As TOML, or in words where it depends on something else; "required" where there is none."""
        extra = self.field.json_schema_extra
        if isinstance(extra, dict) and "default" in extra:
            return str(extra["default"])
        return "required" if self.field.is_required() else to_literal(self.field.default)

    @property
    def meaning(self) -> str:
        return " ".join((self.field.description or "").split())

    @property
    def choices(self) -> list[str]:
        """The names among the values that are allowed."""
        return [value for value in _literals(self.field.annotation) if isinstance(value, str)]

    @property
    def takes_text(self) -> bool:
        return str in _parts(self.field.annotation)


@cache
def sections(schema: type[Config] = Config) -> dict[str, type[Section]]:
    """Dotted section name -> its class, in schema order, a parent before its children."""
    return dict(_walk_sections(schema, ""))


def _walk_sections(parent: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, field in parent.model_fields.items():
        section = section_class(field)
        if section is not None:
            yield prefix + name, section
            yield from _walk_sections(section, f"{prefix}{name}.")


@cache
def keys(schema: type[Config] = Config) -> dict[str, Key]:
    """Dotted key name -> key, in schema order, a section's own keys before those of its children."""
    return {
        f"{section}.{name}": Key(f"{section}.{name}", field)
        for section, table in sections(schema).items()
        for name, field in table.model_fields.items()
        if section_class(field) is None
    }


def section_class(field: FieldInfo) -> type[Section] | None:
    """The section that a field is, if it is one (a list of tables is not)."""
    return next(filter(_is_section, _parts(field.annotation)), None)


def section_fields(name: str, schema: type[Config]) -> Iterator[tuple[str, FieldInfo]]:
    """The fields that lead to the section `name`, from the outermost, each with its own name."""
    table: type[Section] | None = schema
    for part in name.split("."):
        assert table is not None
        field = table.model_fields[part]
        yield part, field
        table = section_class(field)


def item_class(field: FieldInfo) -> type[Section] | None:
    """The table that a list holds, if it holds tables."""
    is_list = get_origin(field.annotation) is tuple
    return next(filter(_is_section, get_args(field.annotation)[:1]), None) if is_list else None


def _is_section(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, Section)


def title(section: type[Section]) -> str:
    """What a section is about, in one sentence."""
    return " ".join((section.__doc__ or "").split())


def example(field: FieldInfo) -> Any:
    """A valid value of a required key, as TOML gives it."""
    if table := item_class(field):
        return [{name: example(inner) for name, inner in table.model_fields.items() if inner.is_required()}]
    choices = _literals(field.annotation)
    return choices[0] if choices else {int: 1, float: 1.0, str: "x"}[_parts(field.annotation)[0]]


def similar(name: str) -> list[str]:
    """The dotted keys whose last part is `name`, or the nearest to it that there is."""
    close = nearest(name, {key.last for key in keys().values()})
    return [key.name for key in keys().values() if key.last == close]


def difference(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of every key that differs, in schema order; None in an absent section."""
    trees = old.model_dump(), new.model_dump()
    names = keys(type(old)) | keys(type(new))
    pairs = {name: [reduce(_within, name.split("."), tree) for tree in trees] for name in names}
    return [(name, before, after) for name, (before, after) in pairs.items() if before != after]


def _within(table: dict[str, Any] | None, name: str) -> Any:
    return None if table is None else table.get(name)


def allowed(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Which values a type admits, in words."""
    for item in metadata:
        if isinstance(item, Phrase):
            return str(item)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allowed(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if origin in (Union, types.UnionType):
        names = ", ".join(str(value) for value in _literals(annotation))
        others = [allowed(part) for part in arguments if not _literals(part) and part is not type(None)]
        return ", or ".join([names, *others] if names and others else others) or f"one of {names}"
    least = any(hasattr(item, "min_length") for item in metadata)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {'at least one ' if least else ''}{allowed(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)}: " + ", ".join(allowed(part) for part in arguments)
    if origin is dict:
        return f"table of names to {allowed(arguments[1]).removeprefix('one of ')}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = (f"{n} = {allowed(f.annotation, f.metadata)}" for n, f in annotation.model_fields.items())
        return "{" + ", ".join(fields) + "}"
    if annotation is str:
        return "text, not empty" if least else "text"
    name = {int: "integer", float: "number", bool: "true or false"}[annotation]
    bounds = [f"{BOUNDS[type(b)][0]} {getattr(b, BOUNDS[type(b)][1])}" for b in metadata if type(b) in BOUNDS]
    return " ".join([name, " and ".join(bounds)]).strip()


def _parts(annotation: Any) -> list[Any]:
    """The alternatives of a type, without what annotates them."""
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for alternative in get_args(annotation) for part in _parts(alternative)]
    return [annotation]


def _literals(annotation: Any) -> list[Any]:
    return [value for part in _parts(annotation) if get_origin(part) is Literal for value in get_args(part)]
