"""`Problem`: one mistake in a configuration, and its message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from forge.config.keys import to_literal, value_at
from forge.config.schema import Config
from forge.runtime.errors import UserError

LONGEST_VALUE = 80
# The path of a key or section: ("data", "sources", 0, "path") is data.sources[0].path.
KeyPath: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Problem:
    """A mistake of the user, reported as `key = value (source): allowed; remedy`.

    key: path of the key at fault, or one argument of the command line. allowed: the violated rule. others: paths of the
    other keys in the rule. value: the key's value; None: no value. source: origin of the value. phase: number of the
    phase violating the rule, from 1; 0: not a phase.
    """

    key: KeyPath
    allowed: str
    remedy: str = ""
    others: tuple[KeyPath, ...] = ()
    value: Any = None
    source: str = ""
    phase: int = 0

    def __str__(self) -> str:
        value = to_literal(self.value)
        if len(value) > LONGEST_VALUE:
            value = f"{value[: LONGEST_VALUE - 4]} ..."
        return "".join(
            [
                show(self.key),
                f" = {value}" if self.value is not None else "",
                f" ({self.source})" if self.source else "",
                f": {self.allowed}",
                f"; {self.remedy}" if self.remedy else "",
                f" (in phase {self.phase})" if self.phase else "",
            ]
        )


def problem(key: str, allowed: str, remedy: str = "", *others: str) -> Problem:
    """Return a `Problem` about `key`. key, others: dotted names."""
    path, *paths = (tuple(name.split(".")) for name in (key, *others))
    return Problem(path, allowed, remedy, tuple(paths))


def with_values(problems: Iterable[Problem], config: Config, phase: int = 0) -> list[Problem]:
    """Return copies of `problems`, with `value` read from `config` and with the given `phase`."""
    found = list(problems)
    tree = config.model_dump(mode="json") if found else {}
    return [replace(one, value=value_at(tree, one.key), phase=phase) for one in found]


def raise_all(problems: Sequence[Problem]) -> None:
    """Raise UserError with a line for every problem. Do nothing without problems."""
    if len(problems) == 1:
        raise UserError(str(problems[0]))
    if problems:
        count = f"{len(problems)} errors in the configuration:"
        raise UserError("\n  ".join([count, *map(str, problems)]))


def show(path: Sequence[Any]) -> str:
    """Format a key path: ("data", "sources", 0, "path") -> data.sources[0].path."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def multiples(number: int, unit: int) -> str:
    """Return as text the largest multiple of `unit` up to `number`, and the smallest above `number`. 0 is left out."""
    lower = number // unit * unit
    return " or ".join(str(n) for n in (lower, lower + unit) if n)
