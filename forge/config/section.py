"""The base class of all sections, and the types of their keys.

Types are strict: an integer is accepted as a number, but a boolean is not an integer and a string is not a number. The
docstring under a key is the key's only documentation: `--help` and docs/reference/configuration.md are generated from
it. `Unused` in the type of a key gives the condition under which the key has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, Strict, StringConstraints

T = TypeVar("T")


class Section(BaseModel):
    """A table of the configuration: typed, immutable, and complete after loading."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Unused:
    """Metadata of a key: a reason why the key may have no effect. holds(config): whether the reason applies to `config`."""

    reason: str
    holds: Callable[[Any], bool]


def unused(reason: str) -> Unused:
    """Mark a key that never has an effect."""
    return Unused(reason, lambda config: True)


def used_if(key: str, *values: str) -> Unused:
    """Mark a key that has an effect only if the key named `key` has one of `values`."""
    value_in = attrgetter(key)
    return Unused(f"{key} is not {' or '.join(values)}", lambda config: value_in(config) not in values)


def unused_if(key: str, value: object) -> Unused:
    """Mark a key that has no effect if the key named `key` has `value`."""
    value_in, shown = attrgetter(key), "empty" if value in ("", ()) else str(value).lower()
    return Unused(f"{key} is {shown}", lambda config: value_in(config) == value)


class Phrase(str):
    """Metadata of a type: the description of its allowed values in messages and help."""


def _no_float16(value: object) -> object:
    if value == "float16":
        raise ValueError("float16 needs loss scaling, which forge does not have; use bfloat16")
    return value


Positive = Annotated[int, Ge(1)]
Count = Annotated[int, Ge(0)]
PositiveNumber = Annotated[float, Gt(0)]
NonNegativeNumber = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
PositiveShare = Annotated[float, Gt(0), Le(1)]
Text = Annotated[str, MinLen(1)]
ImportPath = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"),
    Phrase("an import path package.module:Name"),
]
NO_EXPERTS = Unused("there is no [model.moe]", lambda config: config.model.moe is None)
Dtype = Annotated[Literal["float64", "float32", "bfloat16"], BeforeValidator(_no_float16)]
# TOML has lists, not tuples, so the list itself is not strict. The items of the list are strict.
ListOf = Annotated[tuple[T, ...], Strict(False)]
