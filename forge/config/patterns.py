"""Patterns of names in a configuration, and their change to the layers of a model with other layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from forge.config.model import ModelConfig
from forge.config.schema import Config

# Keys with patterns of names.
PATTERNS = [
    "optimizer.groups",
    "optimizer.no_decay",
    "parallel.tp_plan",
    "precision.float8_exclude",
    "precision.fp32_modules",
]
# The layers in a pattern of names.
_LAYERS = re.compile(r"(?<![\w.])layers\.([^.]*[\d?\]][^.]*)")


def names_layers(config: Config) -> bool:
    """Return whether a pattern of `config` names layers by number."""
    # The blocks of multi-token prediction are numbered after the layers.
    layers = range(config.model.n_layers + config.model.mtp_depth)

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for key, one in value.items():
                yield key
                yield from texts(one)
        elif isinstance(value, list):
            for one in value:
                yield from texts(one)
        elif isinstance(value, str):
            yield value

    found = (_LAYERS.search(text) for value in _values(config).values() for text in texts(value))
    return any(one and any(fnmatchcase(str(layer), one[1]) for layer in layers) for one in found)


def patterns_of(model: ModelConfig, small: Config) -> dict[str, Any]:
    """Return the patterns of names in `small` that name layers of `model`, changed to name layers of `small`.

    A layer becomes a layer of its kind (attention, experts), at about the same relative depth. A pattern that names several
    layers becomes several patterns.
    """

    def like(layer: int) -> int:
        kind = model.has_experts(layer), model.kind_of(layer)
        layers = range(small.model.n_layers)
        own = [one for one in layers if (small.model.has_experts(one), small.model.kind_of(one)) == kind]
        return own[layer * len(own) // model.n_layers] if own else layer

    def several(pattern: str) -> list[str]:
        found = _LAYERS.search(pattern)
        named = [layer for layer in range(model.n_layers) if found and fnmatchcase(str(layer), found[1])]
        if found is None or not named:
            return [pattern]
        before, after = pattern[: found.start(1)], "*" * found[1].endswith("*") + pattern[found.end() :]
        return [f"{before}{layer}{after}" for layer in dict.fromkeys(map(like, named))]

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [
                new for one in value for new in (several(one) if isinstance(one, str) else [renamed(one)])
            ]
        if isinstance(value, dict):
            return {new: renamed(one) for key, one in value.items() for new in several(key)}
        return value

    return {key: new for key, value in _values(small).items() if (new := renamed(value)) != value}


def _values(config: Config) -> dict[str, Any]:
    """Return the values of the keys in PATTERNS."""
    tree = config.model_dump(mode="json", exclude_none=True)
    return {key: tree[key.split(".")[0]][key.split(".")[1]] for key in PATTERNS}
