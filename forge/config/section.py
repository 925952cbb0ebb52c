"""What all sections have in common, and the types that their keys are made of.

Strict: an integer may stand for a number, nothing else stands for anything else (no booleans for integers, no strings
for numbers). The docstring under a key is its only documentation: `--help` and docs/configuration.md are made from it.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, Strict, StringConstraints

T = TypeVar("T")


class Section(BaseModel):
    """A table of the configuration: typed, complete after loading, never changed."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Phrase(str):
    """Metadata of a text type: how messages and help name what is allowed."""


def _no_float16(value: object) -> object:
    if value == "float16":
        raise ValueError("float16 would need loss scaling, which forge does not do; bfloat16 does not")
    return value


Positive = Annotated[int, Ge(1)]
Count = Annotated[int, Ge(0)]
PositiveNumber = Annotated[float, Gt(0)]
NonNegativeNumber = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Text = Annotated[str, MinLen(1)]
ImportPath = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"),
    Phrase("an import path package.module:Class"),
]
Dtype = Annotated[Literal["float64", "float32", "bfloat16"], BeforeValidator(_no_float16)]
# TOML knows lists only; inside a list everything is as strict as elsewhere.
ListOf = Annotated[tuple[T, ...], Strict(False)]
