"""All keys with types, defaults and meanings, read off the schema: what help, docs and messages share."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from forge.config.schema import Config
from forge.config.section import Phrase, Section
from forge.config.toml import to_literal

BOUNDS = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}


@dataclass(frozen=True)
class Key:
    """One key: `name` is dotted ("model.moe.top_k"), `section` what is before the last dot."""

    name: str
    section: str
    field: FieldInfo

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
        return any(part is str for part in _parts(self.field.annotation))


@cache
def sections() -> dict[str, type[Section]]:
    """Dotted section name -> its class, in schema order, a parent before its children."""
    return dict(_walk_sections(Config, ""))


@cache
def keys() -> dict[str, Key]:
    """Dotted key name -> key, in schema order, a section's own keys before those of its children."""
    return {
        f"{name}.{field_name}": Key(f"{name}.{field_name}", name, field)
        for name, section in sections().items()
        for field_name, field in section.model_fields.items()
        if section_class(field) is None
    }


def section_class(field: FieldInfo) -> type[Section] | None:
    """The section that a field is, if it is one (a list of tables is not)."""
    for part in _parts(field.annotation):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def item_class(field: FieldInfo) -> type[Section] | None:
    """The table that a list holds, if it holds tables."""
    if get_origin(field.annotation) is tuple:
        item = get_args(field.annotation)[0]
        if isinstance(item, type) and issubclass(item, Section):
            return item
    return None


def title(section: type[Section]) -> str:
    """What a section is about, in one sentence."""
    return " ".join((section.__doc__ or "").split())


def example(field: FieldInfo) -> Any:
    """A valid value of a required key, as TOML gives it."""
    table = item_class(field)
    if table is not None:
        return [{name: example(inner) for name, inner in table.model_fields.items() if inner.is_required()}]
    choices = _literals(field.annotation)
    return choices[0] if choices else {int: 1, float: 1.0, str: "x"}[next(_parts(field.annotation))]


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `name` was probably meant to be, whatever its case."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of a message about `name`: the nearest candidate, if one is near."""
    close = nearest(name, candidates)
    return f'; did you mean "{close}"?' if close else ""


def allowed(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Which values a type admits, in words."""
    for item in metadata:
        if isinstance(item, Phrase):
            return str(item)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allowed(arguments[0], [*_flat(arguments[1:]), *metadata])
    if origin is Literal:
        return _choice([str(value) for value in arguments])
    if origin in (Union, types.UnionType):
        return _union([part for part in arguments if part is not type(None)])
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {allowed(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)}: " + ", ".join(allowed(part) for part in arguments)
    if origin is dict:
        return f"table of names to {allowed(arguments[1]).removeprefix('one of ')}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = (f"{n} = {allowed(f.annotation, f.metadata)}" for n, f in annotation.model_fields.items())
        return "{" + ", ".join(fields) + "}"
    if annotation is str:
        return "text, not empty" if any(hasattr(item, "min_length") for item in metadata) else "text"
    name = {int: "integer", float: "number", bool: "true or false"}[annotation]
    bounds = [f"{BOUNDS[type(b)][0]} {getattr(b, BOUNDS[type(b)][1])}" for b in metadata if type(b) in BOUNDS]
    return " ".join([name, " and ".join(bounds)]).strip()


def _choice(values: list[str]) -> str:
    return values[0] if len(values) == 1 else "one of " + ", ".join(values)


def _union(parts: list[Any]) -> str:
    names = [str(value) for part in parts for value in _literals(part)]
    others = [allowed(part) for part in parts if not _literals(part)]
    if not others:
        return _choice(names)
    return ", or ".join([", ".join(names), *others]) if names else ", or ".join(others)


def _flat(metadata: Iterable[Any]) -> Iterator[Any]:
    """pydantic's constraint objects may hold several annotated-types constraints."""
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)


def _parts(annotation: Any) -> Iterator[Any]:
    """The alternatives of a type, without what annotates them."""
    if get_origin(annotation) is Annotated:
        yield from _parts(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _parts(part)
    else:
        yield annotation


def _literals(annotation: Any) -> list[Any]:
    return [value for part in _parts(annotation) if get_origin(part) is Literal for value in get_args(part)]


def _walk_sections(parent: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, field in parent.model_fields.items():
        section = section_class(field)
        if section is not None:
            yield prefix + name, section
            yield from _walk_sections(section, f"{prefix}{name}.")
