"""Load classes and functions by their import paths in a configuration."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from forge.runtime.errors import did_you_mean


def load_class(path: str) -> type[Any]:
    """Import the class at `path`, `package.module:Class`. Raises ValueError with a one-sentence message."""
    return _load(path, "class", lambda found: isinstance(found, type))


def load_function(path: str) -> Callable[..., Any]:
    """Import the function at `path`, `package.module:function`. Raises ValueError with a one-sentence message."""
    return _load(path, "function", callable)


def _load(path: str, what: str, fits: Callable[[object], bool]) -> Any:
    module_name, _, wanted = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        hint = "; is its folder in PYTHONPATH?" if isinstance(error, ModuleNotFoundError) else ""
        raise ValueError(f"{module_name} cannot be imported: {type(error).__name__}: {error}{hint}") from None
    found = getattr(module, wanted, None)
    if not fits(found):
        others = [name for name, value in vars(module).items() if fits(value)]
        raise ValueError(f"{module_name} has no {what} {wanted}{did_you_mean(wanted, others)}")
    return found
