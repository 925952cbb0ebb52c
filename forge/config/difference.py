"""What changed between two configurations."""

from __future__ import annotations

from typing import Any

from forge.config.keys import keys
from forge.config.schema import Config


def difference(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of every key that differs, in schema order; None in an absent section."""
    pairs = ((name, _value(old, name), _value(new, name)) for name in keys())
    return [(name, before, after) for name, before, after in pairs if before != after]


def _value(config: Config, name: str) -> Any:
    value: Any = config.model_dump()
    for part in name.split("."):
        value = None if value is None else value[part]
    return value
