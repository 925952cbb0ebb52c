"""`search`: plan the most promising layouts and return the best.

Rough estimates order the layouts, and each plan corrects the estimates of similar layouts. The search stops when the
remaining layouts are estimated to be much slower than the fastest plan. The numbers in results are those of `--plan`.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from forge.config import Config
from forge.config.keys import to_literal
from forge.observe.hardware import GIB
from forge.runtime.cores import cores
from forge.runtime.errors import UserError
from forge.tools.plan.hardware import Hardware
from forge.tools.plan.layers import traced_layers
from forge.tools.plan.layouts import DOUBT, MODES, CandidateLayout, Changes, layouts, traceable
from forge.tools.plan.plan import Plan, make_plan
from forge.tools.plan.speed import Speed

BEST = 10
TRIES = 24
# A search also ends after this many traced layers (`traced_layers`). A plan without a pipeline traces about 20, a plan
# of an interleaved pipeline 210 to 400.
LAYERS = 1600
# A search ends when the estimate of the next layout exceeds the time of the fastest plan by this factor.
MARGIN = 1.2
# Layouts per round. Each round is chosen with the corrections of earlier rounds. The size does not depend on the number
# of processes, and so neither does the result. The first round has only cheap plans.
ROUND = 8
# Layouts within this factor of the fastest count as equally fast, because plans are far less accurate.
EQUAL = 1.02
# Assumed upper bound of the ratio (estimated activations) / (planned activations), if a layout with equal `shapes` has been
# planned. Otherwise the bound is DOUBT.
KNOWN = 1.05
# Free memory to spare: 3 GiB, or 5% of the memory of a small GPU.
SPARE, SMALL_SPARE = 3 * GIB, 0.05


@dataclass(frozen=True)
class Found:
    """A layout and its plan."""

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
    config: Config,
    world: int,
    hardware: Hardware,
    *,
    tries: int = TRIES,
    processes: int | None = None,
    allowed: Callable[[Changes], bool] = lambda changes: True,
) -> list[Found]:
    """Plan up to `tries` layouts on `world` ranks. Return the layouts that fit with memory to spare, the fastest first.

    If no layout has memory to spare, return the layouts that fit. If none fits, return the layout with the least memory.
    processes: number of planning processes; None: one per core, eight at most. allowed: a further condition on a layout's
    changes. Raises UserError if no layout is valid or can be planned.
    """
    left = layouts(config, world, hardware, allowed=allowed)
    if not left:
        left = layouts(config, world, hardware, any_memory=True, allowed=allowed)
        left = sorted(left, key=lambda layout: layout.state)[:ROUND]
    if not left:
        raise UserError(
            f"--search: no layout of this config is valid on {world} processes; --plan without --search says why"
        )
    tried: list[tuple[CandidateLayout, Found]] = []
    asked, layers = 0, LAYERS
    with _pool(processes) as pool:
        while left and asked < tries:
            corrected = Corrections(tried)
            fastest = min((one.speed.step_s for _, one in tried if has_room(one, hardware)), default=None)
            if fastest is None and asked >= tries // 2:
                ordered = sorted(left, key=corrected.bytes)  # nothing fits so far: look for the least memory
            else:
                ordered = _promising(left, corrected, hardware)
                if fastest is None:
                    ordered = ordered or sorted(left, key=corrected.bytes)
                elif not ordered or corrected.seconds(ordered[0]) > MARGIN * fastest:
                    break
            limit = min(ROUND, tries - asked)
            chosen = _next(ordered, limit, layers) if asked else _first(ordered)[:tries]
            if not chosen:
                break
            left = [layout for layout in left if layout not in chosen]
            asked += len(chosen)
            layers -= sum(traced_layers(layout.config, layout.degrees) for layout in chosen)
            answers = pool(chosen, hardware)
            pairs = zip(chosen, answers, strict=True)
            tried += [(layout, found) for layout, found in pairs if found is not None]
            print(
                _progress(asked, tries, [found for _, found in tried if found.fits]),
                file=sys.stderr,
                flush=True,
            )
    if not tried:
        raise UserError("--search: no layout of this config can be planned; --plan without --search says why")
    found = [one for _, one in tried]
    fitting_ones = _in_order([one for one in found if one.fits])
    with_room = _in_order([one for one in fitting_ones if has_room(one, hardware)])
    return (
        with_room or fitting_ones or [min(found, key=lambda one: (one.plan.fits_hosts is False, one.needed))]
    )


def _in_order(found: list[Found]) -> list[Found]:
    """Sort layouts by step time. Layouts within a factor EQUAL of the fastest come first, fewest axes first."""
    limit = EQUAL * min((one.speed.step_s for one in found), default=0.0)

    def key(one: Found) -> tuple[bool, int, float]:
        seconds, degrees = one.speed.step_s, one.plan.degrees
        axes = sum(degree > 1 for degree in (degrees.tp, degrees.cp, degrees.ep, degrees.pp))
        slower = seconds > limit
        return slower, 0 if slower else axes, seconds

    return sorted(found, key=key)


def has_room(found: Found, hardware: Hardware) -> bool:
    """Return whether the layout fits in the host memory and in the usable part of the GPU memory (`usable_bytes`)."""
    return found.fits and found.needed <= usable_bytes(hardware)


def usable_bytes(hardware: Hardware) -> float:
    """Return the GPU's memory in bytes minus a reserve: SPARE bytes or, on a small GPU, the fraction SMALL_SPARE."""
    return hardware.memory_bytes - min(SPARE, SMALL_SPARE * hardware.memory_bytes)


def _progress(asked: int, tries: int, fitting: list[Found]) -> str:
    best = min(fitting, key=lambda one: one.speed.step_s, default=None)
    so_far = "none fits so far"
    if best is not None:
        so_far = (
            f"fastest so far {best.speed.step_s:.3g} s per step: {' '.join(best.overrides) or 'no overrides'}"
        )
    return f"planned {asked} of at most {tries} layouts; {so_far}"


class Corrections:
    """Correct estimates: multiply them by the median of plan / estimate over the most similar planned layouts.

    The most similar layouts have an equal signature. If no such layout has been planned, use layouts with equal shapes, then
    with equal sizes, then with equal recomputation mode and both or neither pipelined, then with equal recomputation mode,
    then any layouts.
    """

    def __init__(self, tried: list[tuple[CandidateLayout, Found]]):
        self._seconds: dict[Any, list[float]] = {}
        self._bytes: dict[Any, list[float]] = {}
        for layout, found in tried:
            activations = found.needed - sum(found.plan.worst.state.values())
            for key in _keys(layout):
                self._seconds.setdefault(key, []).append(found.speed.step_s / layout.seconds)
                self._bytes.setdefault(key, []).append(activations / layout.activations)

    def seconds(self, layout: CandidateLayout) -> float:
        return layout.seconds * self._factor(self._seconds, layout)

    def bytes(self, layout: CandidateLayout) -> float:
        return layout.state + layout.activations * self._factor(self._bytes, layout)

    def least_bytes(self, layout: CandidateLayout) -> float:
        """Return a lower bound of the layout's memory in bytes.

        It is the state, plus the corrected estimate of the activations divided by KNOWN or DOUBT. The divisor is KNOWN if
        a layout with equal `shapes` has been planned.
        """
        is_known = layout.signature in self._seconds or layout.shapes in self._seconds
        doubt = KNOWN if is_known else DOUBT
        return layout.state + layout.activations * self._factor(self._bytes, layout) / doubt

    @staticmethod
    def _factor(factors: dict[Any, list[float]], layout: CandidateLayout) -> float:
        for key in _keys(layout):
            if key in factors:
                return median(factors[key])
        return 1.0


def _keys(layout: CandidateLayout) -> tuple[Any, ...]:
    # Estimates of pipelines have further errors: bubbles, unequal stages, unreduced gradients.
    kind = layout.degrees.pp > 1, layout.mode
    return layout.signature, layout.shapes, layout.sizes, kind, layout.mode, None


def _promising(
    left: list[CandidateLayout], corrected: Corrections, hardware: Hardware
) -> list[CandidateLayout]:
    """Return the layouts that may fit, by increasing corrected seconds.

    Leave out an interleaved pipeline until the 1F1B pipeline with equal `shapes` has been planned. A 1F1B plan takes a
    quarter of the time and corrects the estimates of both.
    """
    waits = {layout.shapes for layout in left if layout.schedule == "1F1B"}

    def is_ready(layout: CandidateLayout) -> bool:
        return not layout.changes or layout.schedule != "Interleaved1F1B" or layout.shapes not in waits

    may_fit = [one for one in left if is_ready(one) and corrected.least_bytes(one) <= usable_bytes(hardware)]
    return sorted(may_fit, key=corrected.seconds)


def _first(left: list[CandidateLayout]) -> list[CandidateLayout]:
    """Return the layouts of the first round: the config's own, and two plain layouts per recomputation mode.

    One of the two has the least estimated memory, the other the least estimated time. If a mode has no plain layouts, e.g.
    with more GPUs than sequences, take simple layouts instead. If `left` has none of these layouts, return up to ROUND
    layouts of different sizes (`_next`).
    """
    chosen = [layout for layout in left if not layout.changes]
    for mode in MODES:
        simple = [one for one in left if one.mode == mode and one.is_simple and one not in chosen]
        simple = [one for one in simple if one.is_plain] or simple
        if simple:
            chosen.append(min(simple, key=Corrections([]).bytes))
            chosen += [layout for layout in simple[:1] if layout not in chosen]
    return chosen or _next(left, ROUND)


def _next(left: list[CandidateLayout], number: int, layers: int = LAYERS) -> list[CandidateLayout]:
    """Return up to `number` layouts with different `sizes`, in the order of `left`.

    Their plans trace at most `layers` layers in all. `sizes` are the degrees and the micro batch size. A round plans one
    layout per `sizes`, because this plan corrects the estimates of all layouts with equal `sizes`.
    """
    chosen: dict[Any, CandidateLayout] = {}
    for layout in left:
        if len(chosen) == number:
            break
        if layout.sizes not in chosen and (cost := traced_layers(layout.config, layout.degrees)) <= layers:
            chosen[layout.sizes] = layout
            layers -= cost
    return list(chosen.values())


@contextmanager
def _pool(processes: int | None) -> Iterator[Any]:
    """Yield a function of (layouts, hardware) that calls `_attempt` for each layout on `processes` processes, and waits.

    The function returns the results in the order of the layouts. processes: None: one per core, eight at most. 1: call in
    this process.
    """
    number = processes or min(8, cores())
    if number == 1:
        yield lambda chosen, hardware: [_attempt(layout, hardware) for layout in chosen]
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(
        number, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:

        def in_parallel(chosen: list[CandidateLayout], hardware: Hardware) -> list[Found | None]:
            # The longest plans start first, so that processes end at about the same time.
            longest_first = sorted(chosen, key=lambda one: -traced_layers(one.config, one.degrees))
            started = {id(one): pool.submit(_attempt, one, hardware) for one in longest_first}
            return [started[id(one)].result() for one in chosen]

        yield in_parallel


def _attempt(layout: CandidateLayout, hardware: Hardware) -> Found | None:
    """Return the layout with its plan; None if the layout cannot be planned."""
    try:
        if not traceable(layout):
            return None
        return Found(layout.changes, make_plan(layout.config, layout.degrees, hardware))
    except UserError:
        return None


def fewest_ranks(
    config: Config,
    world: int,
    hardware: Hardware,
    *,
    allowed: Callable[[int], Callable[[Changes], bool]] = lambda world: lambda changes: True,
) -> int | None:
    """Try 2, 4, 8, ... times `world` ranks. Return the first number of ranks with a layout that fits.

    Return None if no number up to 64 times `world` has such a layout. Only the layouts with the smallest estimated
    memory are planned. allowed: number of ranks -> a further condition on a layout's changes.
    """
    size = 2 * world
    with _pool(None) as pool:
        while size <= 64 * world:
            legal = layouts(config, size, hardware, allowed=allowed(size))
            least = sorted(legal, key=Corrections([]).bytes)[: ROUND // 2]
            if any(found is not None and found.fits for found in pool(least, hardware)):
                return size
            size *= 2
    return None
