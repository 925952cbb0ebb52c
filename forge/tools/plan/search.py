"""`search`: plans the legal layouts that promise most, and returns the best of them.

The order comes from a rough estimate, which every plan corrects for layouts of the same shapes. So layouts that are worse
than the best ten by far are never planned, and what is returned is what `--plan` says of each.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from forge.config import Config
from forge.config.keys import to_literal
from forge.observe.hardware import GIB
from forge.runtime.compat import cores
from forge.runtime.errors import UserError
from forge.tools.plan.hardware import Hardware
from forge.tools.plan.layouts import MODES, Changes, Layout, layouts, traceable
from forge.tools.plan.plan import Plan, make_plan
from forge.tools.plan.speed import Speed

BEST = 10
TRIES = 24
# Layouts that are planned before the next ones are chosen; a constant, so that more processes find the same. Before the first
# ROUND come cheap plans, whose corrections keep layouts out that cannot fit.
ROUND = 8
# Memory that a layout leaves free: three GiB, of a small GPU a twentieth.
SPARE, SMALL_SPARE = 3 * GIB, 0.05


@dataclass(frozen=True)
class Found:
    """A layout with its plan."""

    changes: Changes
    plan: Plan

    @property
    def needed(self) -> int:
        return self.plan.worst.needed

    @property
    def speed(self) -> Speed:
        assert self.plan.speed is not None
        return self.plan.speed

    @property
    def fits(self) -> bool:
        return bool(self.plan.fits)

    @property
    def overrides(self) -> list[str]:
        return [f"--{key}={to_literal(value)}" for key, value in self.changes.items()]


def search(
    config: Config, world: int, hardware: Hardware, *, tries: int = TRIES, processes: int | None = None
) -> list[Found]:
    """Plan up to `tries` layouts on `world` ranks; return those that fit with room to spare, the fastest first.

    If there are none, those that fit; if none fits, the one that needs least. processes: default, as many as there are
    cores, eight at most.
    """
    left = layouts(config, world, hardware)
    if not left:
        left = layouts(config, world, hardware, any_memory=True)
        left = sorted(left, key=lambda layout: layout.state)[:ROUND]
    if not left:
        raise UserError(
            f"--search: no layout of this config is valid on {world} processes; see what --plan alone says"
        )
    tried: list[tuple[Layout, Found]] = []
    asked = 0
    with _pool(processes) as pool:
        while left and asked < tries:
            corrected = Corrections(tried)
            if not any(has_room(found, hardware) for _, found in tried) and asked >= tries // 2:
                left.sort(key=corrected.bytes)  # nothing fits so far: look for what needs least
            else:
                left = _promising(left, corrected, hardware) or sorted(left, key=corrected.bytes)
            fitting = sorted(found.speed.step_s for _, found in tried if has_room(found, hardware))
            if len(fitting) >= BEST and corrected.seconds(left[0]) > fitting[BEST - 1]:
                break
            chosen = _next(left, min(ROUND, tries - asked)) if asked else _first(left)[:tries]
            left = [layout for layout in left if layout not in chosen]
            asked += len(chosen)
            answers = pool(chosen, hardware)
            pairs = zip(chosen, answers, strict=True)
            tried += [(layout, found) for layout, found in pairs if found is not None]
            print(
                _progress(asked, tries, [found for _, found in tried if found.fits]),
                file=sys.stderr,
                flush=True,
            )
    if not tried:
        raise UserError("--search: no layout of this config can be planned; see what --plan alone says")
    found = [one for _, one in tried]
    fitting_ones = sorted((one for one in found if one.fits), key=lambda one: one.speed.step_s)
    with_room = [one for one in fitting_ones if has_room(one, hardware)]
    return with_room or fitting_ones or [min(found, key=lambda one: one.needed)]


def has_room(found: Found, hardware: Hardware) -> bool:
    """Return whether the layout leaves SPARE bytes free, or SMALL_SPARE of a small GPU's memory."""
    return found.needed <= usable_bytes(hardware)


def usable_bytes(hardware: Hardware) -> float:
    """Return the memory without what stays free."""
    return hardware.memory_bytes - min(SPARE, SMALL_SPARE * hardware.memory_bytes)


def _progress(asked: int, tries: int, fitting: list[Found]) -> str:
    best = min(fitting, key=lambda one: one.speed.step_s, default=None)
    so_far = "none fits so far"
    if best is not None:
        so_far = (
            f"fastest so far {best.speed.step_s:.3g} s per step: {' '.join(best.overrides) or 'as it is'}"
        )
    return f"planned {asked} of at most {tries} layouts; {so_far}"


class Corrections:
    """What plans so far say of layouts that are not yet planned: of the same shapes, else of the same recomputation."""

    def __init__(self, tried: list[tuple[Layout, Found]]):
        self._seconds: dict[Any, list[float]] = {}
        self._bytes: dict[Any, list[float]] = {}
        for layout, found in tried:
            activations = found.needed - sum(found.plan.worst.state.values())
            for key in (layout.signature, layout.mode, None):
                self._seconds.setdefault(key, []).append(found.speed.step_s / layout.seconds)
                self._bytes.setdefault(key, []).append(activations / layout.activations)

    def seconds(self, layout: Layout) -> float:
        return layout.seconds * self._factor(self._seconds, layout)

    def bytes(self, layout: Layout) -> float:
        return layout.state + layout.activations * self._factor(self._bytes, layout)

    def is_known(self, layout: Layout) -> bool:
        return layout.signature in self._seconds

    @staticmethod
    def _factor(factors: dict[Any, list[float]], layout: Layout) -> float:
        for key in (layout.signature, layout.mode, None):
            if key in factors:
                return median(factors[key])
        return 1.0


def _promising(left: list[Layout], corrected: Corrections, hardware: Hardware) -> list[Layout]:
    """Those that may fit, the fastest first. What is known of other shapes only is doubted."""

    def may_fit(layout: Layout) -> bool:
        doubt = 1.02 if corrected.is_known(layout) else 1.5
        return corrected.bytes(layout) <= doubt * usable_bytes(hardware)

    return sorted(filter(may_fit, left), key=corrected.seconds)


def _first(left: list[Layout]) -> list[Layout]:
    """Return the config's own layout, and FSDP with each mode of recomputation; if none is legal, the first ROUND."""
    chosen = [layout for layout in left if not layout.changes]
    for mode in MODES:
        plain = [
            layout for layout in left if layout.is_plain and layout.mode == mode and layout not in chosen
        ]
        chosen += [min(plain, key=Corrections([]).bytes)] if plain else []
    return chosen or _next(left, ROUND)


def _next(left: list[Layout], number: int) -> list[Layout]:
    """Return the first layouts that are of different shapes."""
    chosen: dict[Any, Layout] = {}
    for layout in left:
        if len(chosen) < number:
            chosen.setdefault(layout.signature, layout)
    return list(chosen.values())


@contextmanager
def _pool(processes: int | None) -> Iterator[Any]:
    """Yield a function that plans layouts, on as many processes as there are cores."""
    number = processes or min(8, cores())
    if number == 1:
        yield lambda chosen, hardware: [_attempt(layout, hardware) for layout in chosen]
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(
        number, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        yield lambda chosen, hardware: list(pool.map(_attempt, chosen, [hardware] * len(chosen)))


def _attempt(layout: Layout, hardware: Hardware) -> Found | None:
    """The plan of a layout; None if it cannot be planned."""
    try:
        if not traceable(layout):
            return None
        return Found(layout.changes, make_plan(layout.config, layout.degrees, hardware))
    except UserError:
        return None


def fewest_ranks(
    config: Config, world: int, hardware: Hardware, limit: int = 64, *, processes: int | None = None
) -> int | None:
    """Return the fewest ranks, in doublings of `world`, on which a layout fits that needs little; None: beyond `limit`."""
    size = 2 * world
    with _pool(processes) as pool:
        while size <= limit * world:
            least = sorted(layouts(config, size, hardware), key=Corrections([]).bytes)[: ROUND // 2]
            if any(found is not None and found.fits for found in pool(least, hardware)):
                return size
            size *= 2
    return None
