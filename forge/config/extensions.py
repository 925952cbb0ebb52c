"""Import paths in the configuration, and the keys added by a user's own optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

from pydantic import ConfigDict, create_model

from forge.config.schema import Config, OptimizerConfig
from forge.config.section import Section
from forge.runtime.errors import UserError
from forge.runtime.imports import load_class

OPTIMIZER_METHODS = ("step", "tensors", "state", "load_state")


def import_paths(config: Config) -> dict[str, str]:
    """Return key -> import path for every class and function named by a configuration."""
    plan = config.parallel.tp_plan
    named: dict[str, Sequence[str]] = {
        "model.kind": [config.model.kind],
        "optimizer.name": [config.optimizer.name],
        "parallel.tp_plan": [plan] if isinstance(plan, str) else [],
        "train.hooks": config.train.hooks,
    }
    return {key: path for key, paths in named.items() for path in paths if ":" in path}


def require_trust(config: Config, source: str, keys: Collection[str] | None = None) -> None:
    """Raise UserError if a configuration names import paths. Call unless the user trusts the configuration.

    Importing a module runs its code, so a file of another user must not choose the module. source: the opened file,
    for the message. keys: the keys to check; None: all.
    """
    for key, path in import_paths(config).items():
        if keys is None or key in keys:
            raise UserError(
                f'{source}: {key} = "{path}" is an import path, and importing it runs its code; if you trust this folder and '
                "that module, give --trust"
            )


class _Unchecked(Section):
    model_config = ConfigDict(extra="allow")


def schema_for(tree: dict[str, Any], import_classes: bool) -> tuple[type[Config], str | None]:
    """Return the schema of the configuration `tree`, and the error in the optimizer class, if any.

    An optimizer named by import path adds its table of keys to [optimizer]. If the optimizer's class is invalid, or
    `import_classes` is false, the table is accepted unchecked.
    """
    table = tree.get("optimizer")
    name = table.get("name") if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(name, str) or ":" not in name:
        return Config, None
    error = None
    if import_classes:
        try:
            return _schema_with_optimizer(name), None
        except ValueError as found:
            error = str(found)
    unknown = table.keys() - OptimizerConfig.model_fields
    return _extend(
        {key: _Unchecked for key in table if key in unknown and isinstance(table[key], dict)}
    ), error


@cache
def _schema_with_optimizer(path: str) -> type[Config]:
    """Return `Config` extended by the table of the optimizer at import path `path`.

    Raises ValueError if the class lacks an optimizer's interface.
    """
    cls, help_page = load_class(path), "docs/internals/extending/optimizer.md says what an optimizer needs"
    missing = [f"{name}()" for name in OPTIMIZER_METHODS if not callable(getattr(cls, name, None))]
    if missing:
        raise ValueError(f"{cls.__name__} has no method {', '.join(missing)}; {help_page}")
    try:
        inspect.signature(cls).bind("shards", "config", "group")
    except TypeError as error:
        raise ValueError(f"{cls.__name__}(shards, config, group) fails: {error}; {help_page}") from None
    keys, section = getattr(cls, "Keys", None), getattr(cls, "section", cls.__name__.lower())
    if keys is None:
        return Config
    if not (isinstance(keys, type) and issubclass(keys, Section)):
        raise ValueError(f"{cls.__name__}.Keys is not a subclass of forge.config.Section; {help_page}")
    if section in OptimizerConfig.model_fields:
        remedy = f"set {cls.__name__}.section to another name"
        same = f"the table [optimizer.{section}] of {cls.__name__} has the name of a key of [optimizer]"
        raise ValueError(f"{same}; {remedy}")
    return _extend({section: keys})


def _extend(tables: dict[str, type[Section]]) -> type[Config]:
    """Return `Config` with `tables` added to [optimizer]."""
    fields = {name: _field(table) for name, table in tables.items()}
    optimizer = _derive("OptimizerConfig", OptimizerConfig, fields)
    return _derive("Config", Config, {"optimizer": _field(optimizer)})


def _derive(name: str, base: type[Any], fields: dict[str, Any]) -> Any:
    return create_model(name, __base__=base, __doc__=base.__doc__, **fields)


def _field(section: type[Section]) -> Any:
    """Return (type, default) of a field for `section`. The field is required if a key of `section` is required."""
    required = any(field.is_required() for field in section.model_fields.values())
    return section, ... if required else section()
