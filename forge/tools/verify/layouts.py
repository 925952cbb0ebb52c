"""Layouts to compare: every axis alone, every pair of axes, every engine, then random layouts.

This file has no rules about legal degrees: the configuration's own checks refuse illegal layouts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

from forge.config import Config, check_world, to_toml
from forge.config.keys import from_literal
from forge.config.keys import keys as all_keys
from forge.runtime.errors import UserError
from forge.tools.verify.shrink import changed

AXES = ("dp_shard", "dp_replicate", "cp", "tp", "ep", "pp")
# (key, axis, values) of options of a layout. `systematic` tries the first ALONE options one at a time, on two ranks of their
# axis. `at_random` combines all options at random.
OPTIONS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("parallel.data_parallel", "dp_shard", ("ddp", "zero1", "zero2", "fsdp2")),
    ("parallel.context", "cp", ("allgather", "ulysses", "ring")),
    ("parallel.sequence_parallel", "tp", (False, True)),
    ("parallel.loss_parallel", "tp", (False, True)),
    ("activation_checkpoint.mode", "dp_shard", ("full", "selective", "offload", "none")),
    ("parallel.defer_gradient_reduction", "dp_shard", (True, False)),
    ("parallel.reshard_after_forward", "dp_shard", ("always", "never", "auto")),
    ("parallel.ep_node_size", "ep", (1, 2)),
    ("parallel.ep_overlap", "ep", (True, False)),
    (
        "pipeline.schedule",
        "pp",
        ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
    ),
    ("train.micro_batch_size", "dp_shard", (2, 4, 1)),
)  # fmt: skip
ALONE = 6


@dataclass(frozen=True)
class Case:
    """One layout. degrees: (axis, degree) for degrees above 1. options: (key, value) of configuration overrides."""

    degrees: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, degrees: dict[str, int], options: dict[str, Any] | None = None) -> Case:
        """Return the case with these degrees.

        If `ep` is a larger multiple of dp_shard * cp * tp, raise dp_shard until the product is `ep`.
        """
        degrees = {axis: degrees[axis] for axis in AXES if degrees.get(axis, 1) > 1}
        sharing = prod(degrees.get(axis, 1) for axis in ("dp_shard", "cp", "tp"))
        if degrees.get("ep", 1) > sharing and degrees["ep"] % sharing == 0:
            degrees["dp_shard"] = degrees.get("dp_shard", 1) * degrees["ep"] // sharing
        ordered = {axis: degrees[axis] for axis in AXES if axis in degrees}
        return cls(tuple(ordered.items()), tuple((options or {}).items()))

    @property
    def world(self) -> int:
        """The number of ranks."""
        return prod(degree for axis, degree in self.degrees if axis != "ep")

    @property
    def name(self) -> str:
        """The layout in the syntax of `--layouts`, e.g. `tp=2 cp=2 context=ring`."""
        options = [(key.removeprefix("parallel."), value) for key, value in self.options]
        shown = [
            f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options
        ]
        return " ".join([f"{axis}={degree}" for axis, degree in self.degrees] + shown) or "one process"

    def config(self, config: Config) -> Config:
        """Apply this layout to the one-process configuration `config` and return the result.

        Raises UserError if the result is illegal.
        """
        keys = {f"parallel.{axis}": degree for axis, degree in self.degrees} | dict(self.options)
        result = changed(config, keys)
        check_world(result, self.world)
        return result

    def text(self, config: Config) -> str:
        """Return `self.config(config)` as TOML text, the form sent to ranks."""
        return to_toml(self.config(config))

    def smaller(self) -> Iterator[Case]:
        """Yield smaller layouts: first without one of the options, then with one degree lowered to 1 or 2."""
        degrees, options = dict(self.degrees), dict(self.options)
        for key in options:
            yield Case.of(degrees, {other: value for other, value in options.items() if other != key})
        for axis, degree in degrees.items():
            for less in (1, 2):
                if less < degree:
                    case = Case.of(degrees | {axis: less}, options)
                    if case != self:
                        yield case


def why_illegal(config: Config, case: Case) -> str | None:
    """Return the reason why the configuration refuses `case`; None if `case` is legal."""
    try:
        case.config(config)
    except UserError as error:
        return str(error).splitlines()[-1].strip()
    return None


def systematic(config: Config, worlds: Sequence[int]) -> Iterator[Case]:
    """Yield the layout of one process, then each axis with degree 2, then each pair of axes with degree 2.

    Then yield one layout for each value of each option in OPTIONS[:ALONE], except the values of `config`, and for each
    number of processes other than 1, 2 and 4 the legal layouts on one axis or, if there is none, on two axes.
    worlds: allowed numbers of processes. Only the first layout may have another number. Other layouts may be illegal.
    """
    axes = [axis for axis in AXES if axis != "ep" or config.model.moe is not None]
    yield Case()
    alone = {axis: Case.of({axis: 2}) for axis in axes}
    pairs = [Case.of(dict.fromkeys(pair, 2)) for pair in combinations(axes, 2)]
    options: list[Case] = []
    for key, axis, values in OPTIONS[:ALONE]:
        options += [Case.of({axis: 2}, {key: value}) for value in values if value != _value(config, key)]
    larger = [case for world in worlds if world not in (1, 2, 4) for case in _of_world(config, axes, world)]
    seen = set()
    for case in (*alone.values(), *pairs, *options, *larger):
        if case.world in worlds and case not in seen:
            seen.add(case)
            yield case


def _of_world(config: Config, axes: Sequence[str], world: int) -> list[Case]:
    """Return the legal layouts of `world` processes on one axis or, if there is none, on two axes."""
    for number in (1, 2):
        split = (degrees for degrees in _factors(world, len(axes)) if sum(d > 1 for d in degrees) == number)
        cases = (Case.of(dict(zip(axes, degrees, strict=True))) for degrees in split)
        if found := [case for case in cases if why_illegal(config, case) is None]:
            return found
    return []


def at_random(config: Config, worlds: Sequence[int], seed: int) -> Iterator[Case]:
    """Yield distinct legal layouts with random degrees and options. Stop after 2,000 rejected draws in a row."""
    generator = random.Random(seed)
    seen: set[Case] = set()
    refused = 0
    divisors = {number for world in worlds for number in range(2, world + 1) if world % number == 0}
    choices = [1, 1, 2, 2, 4] if divisors <= {2, 4} else [1, 1, *sorted(divisors)]
    while refused < 2_000:
        degrees = {axis: generator.choice(choices) for axis in AXES}
        if config.model.moe is None:
            degrees["ep"] = 1
        options = {
            key: value
            for key, axis, values in OPTIONS
            if generator.random() < 0.4
            and (value := generator.choice(values)) != _value(config, key)
            and (axis == "dp_shard" or degrees[axis] > 1)
        }
        case = Case.of(degrees, options)
        if case.world not in worlds or case in seen or why_illegal(config, case) is not None:
            refused += 1
            continue
        refused = 0
        seen.add(case)
        yield case


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def parse_layouts(text: str) -> list[Case]:
    """Parse layouts, e.g. `tp=2 cp=2; ep=4 pp=2 context=ring`. Raises UserError for an unknown key or value."""
    cases = [_parse(part) for part in text.split(";") if part.strip()]
    if not cases:
        raise UserError('--layouts: no layout given; example: "tp=2; dp_shard=2 pp=2"')
    return cases


def require_any(config: Config, world: int) -> None:
    """Raise UserError if the configuration refuses every layout of `world` processes."""
    axes = [axis for axis in AXES if axis != "ep"]
    refused = ""
    for degrees in _factors(world, len(axes)):
        case = Case.of(dict(zip(axes, degrees, strict=True)))
        reason = why_illegal(config, case)
        if reason is None:
            return
        refused = refused or f"{case.name}: {reason}"
    raise UserError(f"--world-sizes: no layout of {world} processes fits this configuration; {refused}")


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `count` factors with product `number`, in descending order of the first factor."""
    if count == 1:
        yield (number,)
        return
    for first in range(number, 0, -1):
        if number % first == 0:
            for rest in _factors(number // first, count - 1):
                yield (first, *rest)


def _literal(word: str, value: str) -> Any:
    """Return `value` parsed. Raises UserError for an incomplete value, or for a list or table."""
    try:
        parsed = from_literal(value, False)
    except ValueError:
        parsed = []
    if isinstance(parsed, list | dict):
        raise UserError(
            f"--layouts: {word}: must be one value, without spaces; give a list as an option: --section.key=[...]"
        )
    return parsed


def _parse(part: str) -> Case:
    if part.strip() == Case().name:
        return Case()
    degrees: dict[str, int] = {}
    options: dict[str, Any] = {}
    for word in part.split():
        name, equals, value = word.partition("=")
        key = name if "." in name else f"parallel.{name}"
        if not equals or key not in all_keys():
            raise UserError(
                f"--layouts: {word} is not KEY=VALUE; KEY is one of {', '.join(AXES)}, another key of [parallel], or "
                "section.key of the config"
            )
        if key.removeprefix("parallel.") not in AXES:
            options[key] = _literal(word, value)
        elif value.isdecimal() and int(value) > 0:
            degrees[name.removeprefix("parallel.")] = int(value)
        else:
            raise UserError(f"--layouts: {word}: needs a whole number of at least 1")
    return Case.of(degrees, options)
