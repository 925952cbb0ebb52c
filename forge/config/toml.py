"""Writing TOML: single values for messages, and whole configurations that load again to what they were."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

from pydantic import BaseModel

from forge.config.schema import Config
from forge.config.section import Section

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# Lists of tables longer than this are written one table a line.
LINE_WIDTH = 100


def to_toml(config: Config) -> str:
    """`config` as TOML with every key, in the schema's order, but for absent keys and sections (None)."""
    blocks: list[str] = []
    for name in type(config).model_fields:
        blocks += _section(name, getattr(config, name))
    return "\n\n".join(blocks) + "\n"


def _section(name: str, section: Section) -> list[str]:
    """The section itself and those within it, each a block of lines."""
    title = (type(section).__doc__ or "").strip().partition("\n")[0]
    lines, children = [*([f"# {title}"] if title else []), f"[{name}]"], []
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, Section):
            children += _section(f"{name}.{key}", value)
        elif value is not None:
            lines.append(_assignment(key, value))
    return ["\n".join(lines), *children]


def _assignment(key: str, value: Any) -> str:
    line = f"{key} = {to_literal(value)}"
    if len(line) <= LINE_WIDTH or not isinstance(value, tuple):
        return line
    return "\n".join([f"{key} = [", *(f"    {to_literal(item)}," for item in value), "]"])


def to_literal(value: Any) -> str:
    """`value` as a TOML literal on one line; floats read back exactly."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_literal(item) for item in value) + "]"
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        items = (f"{_key(key)} = {to_literal(item)}" for key, item in value.items() if item is not None)
        return "{ " + ", ".join(items) + " }" if value else "{}"
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)


def _key(name: str) -> str:
    return name if BARE_KEY.fullmatch(name) else to_literal(name)
