"""Classes from outside forge that a configuration names by import path, and the tables of keys that they bring along."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from typing import Any

from pydantic import create_model

from forge.config.schema import Config
from forge.config.section import Section
from forge.config.training import OptimizerConfig
from forge.errors import did_you_mean

OPTIMIZER_METHODS = ("step", "tensors", "state", "load_state")


def load_class(path: str) -> type:
    """Import the class at `path`, which is `package.module:Class`. Raises ValueError with one sentence."""
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        hint = "" if not isinstance(error, ModuleNotFoundError) else "; is its folder in PYTHONPATH?"
        raise ValueError(f"{module_name} cannot be imported: {type(error).__name__}: {error}{hint}") from None
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        raise ValueError(f"{module_name} has no class {class_name}{did_you_mean(class_name, classes)}")
    return found


def schema_for(tree: dict[str, Any], import_classes: bool) -> tuple[type[Config], str | None]:
    """Return the schema of the configuration `tree`, and what is wrong with the optimizer class that it names, if anything.

    An own optimizer adds its table of keys to [optimizer]. Where its class is wrong or is not to be imported, that table
    is taken as it is, without checks.
    """
    table = tree.get("optimizer")
    name = table.get("name") if isinstance(table, dict) else None
    if not isinstance(name, str) or ":" not in name:
        return Config, None
    assert isinstance(table, dict)
    unchecked = _extend({key: _as_is(keys) for key, keys in table.items() if isinstance(keys, dict)})
    if not import_classes:
        return unchecked, None
    try:
        return _schema_with_optimizer(name), None
    except ValueError as error:
        return unchecked, str(error)


@cache
def _schema_with_optimizer(path: str) -> type[Config]:
    """Return `Config` with the table of the optimizer at `path`. Raises ValueError if the class is no optimizer."""
    cls, help_page = load_class(path), "docs/extending/optimizer.md says what an optimizer needs"
    missing = [f"{name}()" for name in OPTIMIZER_METHODS if not callable(getattr(cls, name, None))]
    if missing:
        raise ValueError(f"{cls.__name__} has no method {', '.join(missing)}; {help_page}")
    try:
        inspect.signature(cls).bind("shards", "config", "group")
    except TypeError as error:
        raise ValueError(f"{cls.__name__}(shards, config, group) fails: {error}; {help_page}") from None
    keys = getattr(cls, "Keys", None)
    if keys is None:
        return Config
    if not (isinstance(keys, type) and issubclass(keys, Section)):
        raise ValueError(f"{cls.__name__}.Keys is no subclass of forge.config.Section; {help_page}")
    section = getattr(cls, "section", cls.__name__.lower())
    if section in OptimizerConfig.model_fields:
        raise ValueError(
            f"its table [optimizer.{section}] is named like a key of [optimizer]; set {cls.__name__}.section to another name"
        )
    return _extend({section: keys})


def _extend(tables: dict[str, type[Section]]) -> type[Config]:
    """Return `Config` with `tables` within [optimizer]."""
    optimizer = create_model(
        "OptimizerConfig",
        __base__=OptimizerConfig,
        __doc__=OptimizerConfig.__doc__,
        **{name: _field(table) for name, table in tables.items() if name not in OptimizerConfig.model_fields},
    )
    return create_model("Config", __base__=Config, __doc__=Config.__doc__, optimizer=_field(optimizer))


def _field(section: type[Section]) -> Any:
    """Return type and default of a field that is `section`, which is required if one of its keys is."""
    required = any(field.is_required() for field in section.model_fields.values())
    return section, ... if required else section()


def _as_is(table: dict[str, Any]) -> type[Section]:
    fields: dict[str, Any] = {key: (Any, _frozen(value)) for key, value in table.items()}
    return create_model("Keys", __base__=Section, **fields)


def _frozen(value: Any) -> Any:
    """Return lists as the tuples that a typed section holds, so that both compare equal."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
