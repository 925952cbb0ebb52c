"""TOML, read and written."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

try:
    from tomli import loads
except ModuleNotFoundError:
    from tomllib import loads  # the same code, in Python since 3.11

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document. Raises ValueError with one sentence."""
    try:
        return loads(text)
    except RecursionError:
        raise ValueError("tables or lists are nested too deeply") from None


def to_literal(value: Any) -> str:
    """Return `value` as a TOML literal on one line; floats read back exactly."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also wants DEL escaped.
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
    """Read `text` as a TOML literal, or as a string if it is a bare word or `is_text` (the key takes text).

    Raises ValueError if `text` begins like a quoted string, list or table but is not one, or is not valid Unicode.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("not UTF-8 text")
    try:
        table = read_toml(f"value = {text}")
    except ValueError as error:
        if is_text or text[:1] not in ("[", "{", '"', "'"):
            return text
        reason = re.sub(r" *[(]at .*", "", str(error))
        raise ValueError(f"not a TOML literal: {reason}; quote strings inside it") from None
    # Text with a line break may read as several keys.
    value = table["value"] if len(table) == 1 else text
    return text if is_text and not isinstance(value, str) else value
