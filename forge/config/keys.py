"""The schema as data: every section and key with its type, default and meaning. Also compares and writes configs by key."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from forge.config.schema import Config
from forge.config.section import Phrase, Section
from forge.config.toml import to_literal

BOUNDS = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}
# `to_toml` writes a list of tables that is longer than this with one table per line.
LINE_WIDTH = 100


@dataclass(frozen=True)
class Key:
    """One key; `name` is dotted: "model.moe.top_k" is the key `last` = "top_k" of `section` "model.moe"."""

    name: str
    field: FieldInfo

    @cached_property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @cached_property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    @cached_property
    def allowed(self) -> str:
        return allowed(self.field.annotation, self.field.metadata)

    @cached_property
    def default(self) -> str:
        """As TOML, or in words where it depends on something else; "required" where there is none."""
        extra = self.field.json_schema_extra
        if isinstance(extra, dict) and "default" in extra:
            return str(extra["default"])
        return "required" if self.field.is_required() else to_literal(self.field.default)

    @cached_property
    def meaning(self) -> str:
        return " ".join((self.field.description or "").split())


@cache
def sections(schema: type[Config] = Config) -> dict[str, type[Section]]:
    """Dotted section name -> its class, in schema order, a parent before its children."""
    return dict(_walk(schema, ""))


def _walk(parent: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, field in parent.model_fields.items():
        if (section := section_class(field)) is not None:
            yield prefix + name, section
            yield from _walk(section, f"{prefix}{name}.")


@cache
def keys(schema: type[Config] = Config) -> dict[str, Key]:
    """Dotted key name -> key, in schema order, a section's own keys before those of its children."""
    found = [
        Key(f"{section}.{name}", field)
        for section, table in sections(schema).items()
        for name, field in table.model_fields.items()
        if section_class(field) is None
    ]
    return {key.name: key for key in found}


def section_class(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, or None."""
    return next(filter(_is_section, _alternatives(field.annotation)), None)


def item_class(field: FieldInfo) -> type[Section] | None:
    """The table that each item of a list field is, or None."""
    is_list = get_origin(field.annotation) is tuple
    return next(filter(_is_section, get_args(field.annotation)[:1]), None) if is_list else None


def title(section: type[Section]) -> str:
    """What a section is about: the first paragraph of its docstring."""
    return " ".join((section.__doc__ or "").strip().partition("\n\n")[0].split())


def value_at(tree: Any, path: Iterable[Any]) -> Any:
    """The value at `path` in nested tables and lists; None where there is none."""
    for part in path:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def difference(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of every key that differs, in schema order; None in an absent section."""
    trees, names = (old.model_dump(), new.model_dump()), keys(type(old)) | keys(type(new))
    pairs = {name: [value_at(tree, name.split(".")) for tree in trees] for name in names}
    return [(name, before, after) for name, (before, after) in pairs.items() if before != after]


def to_toml(config: Config) -> str:
    """`config` as TOML with every key, in schema order, except absent keys and sections (None)."""
    tree, blocks = config.model_dump(), []
    for section, table in sections(type(config)).items():
        values = value_at(tree, section.split("."))
        if values is not None:
            own = (name for name, field in table.model_fields.items() if section_class(field) is None)
            lines = [_assignment(name, values[name]) for name in own if values[name] is not None]
            comment = [f"# {title(table)}"] if table.__doc__ else []
            blocks.append("\n".join([*comment, f"[{section}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def _assignment(key: str, value: Any) -> str:
    line = f"{key} = {to_literal(value)}"
    if len(line) <= LINE_WIDTH or not isinstance(value, tuple):
        return line
    return "\n".join([f"{key} = [", *(f"    {to_literal(item)}," for item in value), "]"])


def allowed(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values that a type admits, in words."""
    for item in metadata:
        if isinstance(item, Phrase):
            return str(item)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allowed(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal or origin in (Union, types.UnionType):
        names = literals(annotation)
        types_ = () if origin is Literal else arguments
        others = [allowed(part) for part in types_ if part is not type(None) and not literals(part)]
        one_of = "one of " if len(names) > 1 and not others else ""
        return ", or ".join([*([one_of + ", ".join(map(str, names))] if names else []), *others])
    not_empty = any(hasattr(item, "min_length") for item in metadata)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {'at least one ' if not_empty else ''}{allowed(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)}: " + ", ".join(map(allowed, arguments))
    if origin is dict:
        return f"table of names to {allowed(arguments[1]).removeprefix('one of ')}"
    if _is_section(annotation):
        items = [f"{name} = {Key(name, field).allowed}" for name, field in annotation.model_fields.items()]
        return "{" + ", ".join(items) + "}"
    if annotation is str:
        return "text, not empty" if not_empty else "text"
    bounds = [f"{BOUNDS[type(b)][0]} {getattr(b, BOUNDS[type(b)][1])}" for b in metadata if type(b) in BOUNDS]
    name = {int: "integer", float: "number", bool: "true or false"}[annotation]
    return " ".join([name, " and ".join(bounds)]).strip()


def literals(annotation: Any) -> list[Any]:
    """The values that a type lists one by one."""
    parts = _alternatives(annotation)
    return [value for part in parts if get_origin(part) is Literal for value in get_args(part)]


def takes_text(annotation: Any) -> bool:
    """Whether a type admits any text."""
    return str in _alternatives(annotation)


def add_examples(table: dict[str, Any], schema: type[Section]) -> dict[str, Any]:
    """Add a valid value for every required key that `table` lacks, also in its sections; return it."""
    for name, field in schema.model_fields.items():
        section, item = section_class(field), item_class(field)
        if field.is_required() and name not in table:
            table[name] = {} if section else [add_examples({}, item)] if item else _example(field.annotation)
        if section and name in table:
            add_examples(table[name], section)
    return table


def _example(annotation: Any) -> Any:
    choices = literals(annotation)
    return choices[0] if choices else {int: 1, float: 1.0, str: "x"}[_alternatives(annotation)[0]]


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, without their annotations."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for member in get_args(annotation) for part in _alternatives(member)]
    return [annotation]


def _is_section(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, Section)
