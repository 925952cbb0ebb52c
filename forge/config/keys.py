"""The schema as data: sections and keys with types, defaults and meanings. Compare and write configurations by key."""

from __future__ import annotations

import datetime
import json
import re
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from forge.config.schema import Config
from forge.config.section import Phrase, Section
from forge.runtime.errors import redact, redact_all

BOUNDS = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}
# In characters. `to_toml` writes a longer list with one item per line.
LINE_WIDTH = 100


@dataclass(frozen=True)
class Key:
    """One key of the schema.

    default: a TOML literal. If `in_words` is true: "required", or a text on how other keys determine the value.
    """

    name: str  # dotted: "model.moe.top_k"
    section: str  # "model.moe"
    last: str  # "top_k"
    annotation: Any
    required: bool
    in_words: bool
    default: str
    allowed: str
    meaning: str


def describe(name: str, field: FieldInfo) -> Key:
    """Return the `Key` declared by `field`. name: its dotted name."""
    section, _, last = name.rpartition(".")
    extra, required = field.json_schema_extra, field.is_required()
    words = str(extra["default"]) if isinstance(extra, dict) else "required" if required else ""
    return Key(
        name=name,
        section=section,
        last=last,
        annotation=field.annotation,
        required=required,
        in_words=bool(words),
        default=words or ("absent" if field.default is None else to_literal(field.default)),
        allowed=allowed(field.annotation, field.metadata),
        meaning=" ".join((field.description or "").split()),
    )


@cache
def sections(schema: type[Config] = Config) -> dict[str, type[Section]]:
    """Return dotted section name -> section class, in schema order: parents before children, then `lists`."""
    found: dict[str, type[Section]] = {}

    def walk(parent: type[Section], prefix: str) -> None:
        for name, field in parent.model_fields.items():
            if (section := section_class(field)) is not None:
                found[prefix + name] = section
                walk(section, f"{prefix}{name}.")

    walk(schema, "")
    return found | lists(schema)


def lists(schema: type[Config] = Config) -> dict[str, type[Section]]:
    """Return name -> table class for each top-level list of tables, e.g. [[phase]]."""
    found = {name: item_class(field) for name, field in schema.model_fields.items()}
    return {name: table for name, table in found.items() if table is not None}


@cache
def keys(schema: type[Config] = Config) -> dict[str, Key]:
    """Return dotted key name -> `Key` in schema order, a section's own keys before those of its children."""
    found = [
        describe(f"{section}.{name}", field)
        for section, table in sections(schema).items()
        for name, field in table.model_fields.items()
        if section_class(field) is None
    ]
    return {key.name: key for key in found}


def title(section: type[Section]) -> str:
    """Return a section's docstring as one line."""
    return " ".join((section.__doc__ or "").split())


def value_at(tree: Any, path: Iterable[Any]) -> Any:
    """Return the value at `path` in nested tables and lists; None if the path does not exist."""
    for part in path:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def tables(config: Config) -> dict[str, dict[str, Any]]:
    """Return dotted section name -> {key: TOML value}, in schema order. Absent sections and `lists` are left out."""
    tree, found = config.model_dump(mode="json"), dict(sections(type(config)))
    for name in lists(type(config)):
        del found[name]
    values = {section: value_at(tree, section.split(".")) for section in found}
    return {
        section: {name: value for name, value in table.items() if f"{section}.{name}" not in found}
        for section, table in values.items()
        if table is not None
    }


def difference(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Return (key, old value, new value) for every differing key, in schema order.

    The value of a key in an absent section is None. Secrets in URLs are redacted and do not count as a difference.
    """
    before, after = redacted_values(old), redacted_values(new)
    names = keys(type(old)) | keys(type(new)) | before | after
    return [
        (name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)
    ]


def redacted_values(config: Config) -> dict[str, Any]:
    """Return dotted key -> value, and name -> value of `lists`. Leave out absent sections; redact secrets in URLs."""
    values = {
        f"{section}.{name}": redact_all(value)
        for section, table in tables(config).items()
        for name, value in table.items()
    }
    return values | redact_all(dict(_lists_of(config)))


def to_toml(config: Config) -> str:
    """Return `config` as TOML with every key, in schema order.

    Absent keys and sections (None) are left out. A `train.steps` computed from `train.tokens` is a comment. Secrets in URLs
    are redacted, because the text is written to run directories and checkpoints.
    """
    blocks = []
    for section, table in tables(config).items():
        comment = title(sections(type(config))[section])
        lines = [_assignment(name, value) for name, value in table.items() if value is not None]
        if section == "train" and table["tokens"]:
            place = list(table).index("steps")
            lines[place] = f"# {lines[place]}: computed from tokens"
        blocks.append("\n".join([*([f"# {comment}"] if comment else []), f"[{section}]", *lines]))
    for name, items in _lists_of(config):
        blocks += [
            "\n".join([f"[[{name}]]", *(_assignment(*pair) for pair in item.items())]) for item in items
        ]
    return redact("\n\n".join(blocks) + "\n")


def _lists_of(config: Config) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return (name, tables) for each top-level list of tables, without keys of value None."""
    tree = config.model_dump(mode="json", exclude_none=True)
    return [(name, tree[name]) for name in lists(type(config))]


def _assignment(key: str, value: Any) -> str:
    line = f"{key} = {to_literal(value)}"
    if len(line) <= LINE_WIDTH or not isinstance(value, list):
        return line
    return "\n".join([f"{key} = [", *(f"    {to_literal(item)}," for item in value), "]"])


def allowed(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the values allowed by a type, for help and messages."""
    for item in metadata:
        if isinstance(item, Phrase):
            return str(item)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allowed(arguments[0], [*arguments[1:], *metadata])
    if origin in (Literal, Union, types.UnionType):
        names = ", ".join(map(str, literals(annotation)))
        members = [] if origin is Literal else [part for part in arguments if part is not type(None)]
        others = [allowed(part) for part in members if not literals(part)]
        one_of = "one of " if "," in names and not others else ""
        return ", or ".join([*([one_of + names] if names else []), *others])
    not_empty = any(hasattr(item, "min_length") for item in metadata)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"{'non-empty ' if not_empty else ''}list of {allowed(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)}: " + ", ".join(map(allowed, arguments))
    if origin is dict:
        return f"table of names to {allowed(arguments[1]).removeprefix('one of ')}"
    if _is_section(annotation):
        items = [f"{n} = {allowed(f.annotation, f.metadata)}" for n, f in annotation.model_fields.items()]
        return "{" + ", ".join(items) + "}"
    if annotation is str:
        return "text, not empty" if not_empty else "text"
    bounds = [f"{BOUNDS[type(b)][0]} {getattr(b, BOUNDS[type(b)][1])}" for b in metadata if type(b) in BOUNDS]
    name = {int: "integer", float: "number", bool: "true or false"}[annotation]
    return " ".join([name, " and ".join(bounds)]).strip()


def literals(annotation: Any) -> list[Any]:
    """Return the values of all `Literal`s in a type."""
    return [value for part in members(annotation) if get_origin(part) is Literal for value in get_args(part)]


def members(annotation: Any) -> list[Any]:
    """Return the members of a union without their metadata; for another type, the type itself."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in members(part)]
    return [annotation]


def section_class(field: FieldInfo) -> type[Section] | None:
    """Return the section class of a field; None if the field is not a section."""
    return next(filter(_is_section, members(field.annotation)), None)


def item_class(field: FieldInfo) -> type[Section] | None:
    """Return the section class of a field's items; None if the field is not a list of sections."""
    items = get_args(field.annotation)[:1] if get_origin(field.annotation) is tuple else ()
    return next(filter(_is_section, items), None)


def _is_section(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, Section)


try:
    from tomli import loads
except ModuleNotFoundError:
    from tomllib import loads  # the same parser, part of Python since 3.11

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document. Raises ValueError with a one-sentence message."""
    try:
        return loads(text)
    except RecursionError:
        raise ValueError("tables or lists are nested too deeply") from None


def to_literal(value: Any) -> str:
    """Return `value` as a TOML literal on one line; floats read back exactly."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are valid in TOML, but TOML also requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_literal, value)) + "]"
    if isinstance(value, dict):
        names = {name: name if BARE_KEY.fullmatch(name) else to_literal(name) for name in value}
        items = [f"{names[name]} = {to_literal(item)}" for name, item in value.items() if item is not None]
        return "{ " + ", ".join(items) + " }" if value else "{}"
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)


def from_literal(text: str, is_text: bool) -> Any:
    """Return the value of the TOML literal `text`, or `text` itself if it is not a literal.

    is_text: return `text` itself unless it is a string literal. Raises ValueError if `text` is not valid Unicode.
    Without `is_text`, also raises ValueError if `text` begins like a quoted string, list or table but cannot be parsed.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("not UTF-8 text")
    try:
        table = read_toml(f"value = {text}")
    except ValueError as error:
        if is_text or text[:1] not in ("[", "{", '"', "'"):
            return text
        reason = re.sub(r" *[(]at .*", "", str(error))
        raise ValueError(f"not a TOML literal: {reason}; quote the strings in lists and tables") from None
    # Text with a line break may parse as several keys.
    value = table["value"] if len(table) == 1 else text
    return text if is_text and not isinstance(value, str) else value
