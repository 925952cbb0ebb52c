"""Compare each layout of a configuration with the run of one process, within a time budget.

A failed or hanging layout does not stop the others.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Literal

import torch

from forge.config import Config, to_toml
from forge.tools.verify.against import compare_records, keep_steady, record_elsewhere, require_checkout
from forge.tools.verify.checkpoints import read_whole
from forge.tools.verify.compare import TOLERANCE, Comparison, compare_rank, elements, merge
from forge.tools.verify.explain import Finding, explain
from forge.tools.verify.layouts import Case, at_random, systematic, why_illegal
from forge.tools.verify.plain import record_plain
from forge.tools.verify.ranks import RankFailed, limit_s, run_ranks
from forge.tools.verify.record import CPU, RankRecord, Settings, WholeRecord, record_on_rank

ALONE = Case()
Status = Literal["equal", "different", "failed"]


@dataclass(frozen=True)
class Outcome:
    """The result of one layout.

    largest: kind of tensor -> largest relative difference. rounded: the same for a run in the formats of the configuration;
    empty unless requested. compared: number of compared tensors. unplaced: names of tensors excluded from the comparison.
    finding: the origin of the difference; None if equal. other: the layout whose checkpoint was loaded.
    """

    case: Case
    status: Status
    seconds: float
    largest: dict[str, float] = field(default_factory=dict)
    rounded: dict[str, float] = field(default_factory=dict)
    compared: int = 0
    unplaced: tuple[str, ...] = ()
    finding: Finding | None = None
    error: str = ""
    other: Case = ALONE

    @property
    def size(self) -> float:
        """The largest relative difference of any kind of tensor."""
        return max(self.largest.values(), default=0.0)


@dataclass
class Report:
    """The results of all layouts.

    refused: (layout, reason) of layouts refused by the configuration's checks. not_reached: number of requested layouts
    for which no time was left. not_found: number of requested random layouts beyond the legal ones. worst: the layout with
    the largest difference. smallest: the result of `Verifier.reduce` for `worst`, i.e. the smallest layout found that still
    differs or fails.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    refused: list[tuple[Case, str]] = field(default_factory=list)
    not_reached: int = 0
    not_found: int = 0
    worst: Outcome | None = None
    smallest: Outcome | None = None

    @property
    def bad(self) -> list[Outcome]:
        """The layouts that differ or failed."""
        return [one for one in self.outcomes if one.status != "equal"]

    def missing(
        self, asked: Sequence[Case] | None, worlds: Sequence[int], random: int | None = None
    ) -> str | None:
        """Return, as a sentence, which requested layouts were not run; None if all were.

        asked: the layouts named by the user; None: no layout was named. worlds: the numbers of processes named by the user.
        random: the number of random layouts named by the user.
        """
        if asked is not None and self.refused:
            case, reason = self.refused[0]
            return f"{case.name} is not allowed: {reason}"
        if (asked is not None or random is not None or not self.outcomes) and self.not_reached:
            return f"the time was too short for {self.not_reached} of them; increase --minutes"
        if self.not_found:
            return f"--random asks for {self.not_found} layouts more than are legal; lower it"
        for world in worlds:
            if asked is None and world not in {one.case.world for one in self.outcomes}:
                return f"no layout of {world} processes was compared"
        return None

    @property
    def compared(self) -> int:
        """The number of layouts that were compared, equal or different; failed layouts do not count."""
        return sum(one.status != "failed" for one in self.outcomes)


class Verifier:
    """Compare layouts of `config` with one process. The constructor runs the reference in one process.

    config: a small configuration for one process. settings: how to make the steps; both checkpoint folders are replaced
    with temporary ones. rounded: `config` in its original formats instead of float64; each layout then also runs in these
    formats and is compared with the float64 reference. None: skip these runs. other: the layout whose checkpoint the next
    layout loads.

    Raises RankFailed if the reference fails.
    """

    def __init__(
        self, config: Config, settings: Settings, tolerance: float = TOLERANCE, rounded: Config | None = None
    ):
        self.config, self.tolerance, self._rounded = config, tolerance, rounded
        self._home = tempfile.TemporaryDirectory(prefix="forge-verify-")
        one = self._folder()
        self._settings = replace(settings, own_folder=one)
        self._known: dict[Case, Outcome] = {}
        # Layout -> folder of its checkpoint. Kept: one process, the last equal layout, and layouts whose checkpoint was
        # loaded by a layout with status `different`.
        self._saved = {ALONE: one}
        self.other = ALONE
        self._file = os.path.join(self._home.name, "reference")
        ((self.order, self._elements),) = run_ranks(
            _plain_on_rank, 1, to_toml(config), self._settings, self._file, timeout=limit_s(1)
        )

    def close(self) -> None:
        """Remove temporary files."""
        self._home.cleanup()

    def patched(self, patch: Callable[[], object] | None) -> Verifier:
        """Return a Verifier that calls `patch` on each rank of a layout, and shares this Verifier's reference."""
        other = copy.copy(self)
        other._settings, other._known = replace(self._settings, patch=patch), {}
        return other

    def check(self, case: Case) -> Outcome:
        """Return the result of the legal layout `case`. Repeated calls return the first result.

        `case` also loads the checkpoint of the latest other layout with several processes and status `equal`. Without such
        a layout, `case` loads the reference's checkpoint.
        """
        if case not in self._known:
            self._known[case] = self._run(case, self.other, keep=True)
        return self._known[case]

    def _folder(self) -> str:
        return tempfile.mkdtemp(dir=self._home.name)

    def _run(self, case: Case, other: Case, keep: bool = False) -> Outcome:
        """Run the layout `case`, which also loads the checkpoint of the layout `other`. Return the result.

        keep: if nothing differs, keep the checkpoint of `case` for the next layout.
        """
        began, folder = time.monotonic(), self._folder()
        try:
            settings = replace(self._settings, own_folder=folder, other_folder=self._saved[other])
            result = self._compare(self.config, case, settings, self.tolerance)
            rounded: dict[str, float] = {}
            if self._rounded is not None:
                settings = replace(self._settings, own_folder=None)
                rounded = self._compare(self._rounded, case, settings, inf).largest
        except RankFailed as error:
            shutil.rmtree(folder)
            return Outcome(case, "failed", time.monotonic() - began, error=str(error), other=other)
        found = outcome_of(case, result, self.order, time.monotonic() - began, rounded, other)
        if keep and found.status == "equal" and case.world > 1 and self._settings.patch is None:
            self._saved[case], self.other = folder, case
            needed = {one.other for one in self._known.values() if one.status == "different"}
            if other != ALONE and other not in needed:
                shutil.rmtree(self._saved.pop(other))
        else:
            shutil.rmtree(folder)
        return found

    def _compare(self, config: Config, case: Case, settings: Settings, tolerance: float) -> Comparison:
        text, files = case.text(config), (settings, self._file, tolerance)
        ranks = run_ranks(_compare_on_rank, case.world, text, *files, timeout=limit_s(case.world))
        return merge(ranks, self._elements)

    def reduce(self, worst: Outcome, time_left: Callable[[], float]) -> Outcome:
        """Remove options and degrees from the layout of `worst` one by one, as long as the layout's status stays the same.

        Return the result of the smallest layout found. Stop early if `time_left()` returns no positive number of seconds.
        """
        smallest, other, again = worst, worst.other, True
        loads = worst.finding is not None and worst.finding.difference.kind in ("loaded", "continued")
        if loads and other != ALONE and time_left() > 0:
            outcome = self._run(worst.case, ALONE)
            if outcome.status == worst.status:
                smallest, other = outcome, ALONE
        while again:
            again = False
            for case in smallest.case.smaller():
                if why_illegal(self.config, case) is not None:
                    continue
                if (loads or case not in self._known) and time_left() <= 0:
                    return smallest
                outcome = self._run(case, other) if loads else self.check(case)
                if outcome.status == worst.status:
                    smallest, again = outcome, True
                    break
        return smallest


def verify(
    verifier: Verifier,
    cases: Sequence[Case] | None,
    *,
    worlds: Sequence[int] = (1, 2, 4),
    random: int | None = None,
    seed: int = 0,
    seconds: float = 300.0,
    begin: Callable[[Case, float], None] = lambda case, left_s: None,
    end: Callable[[Outcome], None] = lambda outcome: None,
) -> Report:
    """Check the layouts `cases` and return the results. Shrink the worst layout that differs or failed.

    cases: None: the layouts of `systematic`, then `random` further layouts drawn at random. random: None: as many as fit
    into `seconds`. seconds: the time budget. begin: called before each layout with its case and the remaining seconds.
    end: called with the result of each layout.

    After a difference or a failure, no random layouts are checked, so that the remaining time is left for the reduction.
    """
    began = time.monotonic()

    def left() -> float:
        return seconds - (time.monotonic() - began)

    report = Report()

    def check(case: Case) -> None:
        begin(case, left())
        report.outcomes.append(verifier.check(case))
        end(report.outcomes[-1])

    planned = list(cases if cases is not None else systematic(verifier.config, worlds))
    for case in _legal(verifier.config, planned, report):
        if left() <= 0:
            report.not_reached += 1
            continue
        check(case)
    if cases is None and not report.bad:
        fresh = (case for case in at_random(verifier.config, worlds, seed) if case not in planned)
        missing = random or 0
        for case in itertools.islice(fresh, random):
            if report.bad:
                break
            if left() <= 0:
                report.not_reached += max(missing, 0)
                break
            check(case)
            missing -= 1
        else:
            report.not_found = max(missing, 0)
    if report.bad:
        # Prefer a difference: it says more than a failure.
        report.worst = max(report.bad, key=lambda one: (one.status == "different", one.size))
        report.smallest = verifier.reduce(report.worst, left)
    return report


def outcome_of(
    case: Case,
    result: Comparison,
    order: Sequence[str],
    seconds: float,
    rounded: dict[str, float] | None = None,
    other: Case = ALONE,
) -> Outcome:
    """Return the Outcome of a layout that ran to its end. other: the layout whose checkpoint was loaded."""
    finding = explain(result, order, other.name) if result.differences else None
    unplaced = tuple(sorted(result.unplaced))
    status: Status = "equal" if finding is None else "different"
    return Outcome(
        case, status, seconds, result.largest, rounded or {}, result.compared, unplaced, finding, other=other
    )


def verify_against(
    config: Config,
    cases: Sequence[Case],
    settings: Settings,
    checkout: Path,
    bound: float,
    end: Callable[[Outcome], None] = lambda outcome: None,
) -> Report:
    """Run each of `cases` with this forge and with the forge of `checkout`, and compare the two recordings.

    bound: allowed relative difference; 0: bitwise equality. Raises UserError if `checkout` has no forge, or if a run with
    the forge of `checkout` fails.
    """
    require_checkout(checkout)
    report = Report()
    for case in _legal(config, cases, report):
        began, text = time.monotonic(), case.text(config)

        def record(text: str = text, world: int = case.world) -> list[RankRecord]:
            return run_ranks(record_on_rank, world, text, settings, timeout=limit_s(world))

        new = record()
        if any(kind == "curve" for one in new for step in one.steps for kind, _ in step.pieces):
            keep_steady(new, record())
        result, order = compare_records(new, record_elsewhere(checkout, text, case.world, settings), bound)
        outcome = outcome_of(case, result, order, time.monotonic() - began)
        report.outcomes.append(outcome)
        end(outcome)
    report.worst = report.smallest = max(report.bad, key=lambda one: one.size, default=None)
    return report


def _legal(config: Config, cases: Sequence[Case], report: Report) -> Iterator[Case]:
    for case in cases:
        reason = why_illegal(config, case)
        if reason is None:
            yield case
        else:
            report.refused.append((case, reason))


def _plain_on_rank(
    _rank: int, _world: int, text: str, settings: Settings, file: str
) -> tuple[list[str], dict]:
    """Run the reference and write it to `file`.

    Return the modules in computation order, and the sizes of the reference's tensors for `merge`.
    """
    logging.disable(logging.WARNING)
    reference = record_plain(text, settings)
    drop_unsteady(reference, text, settings)
    torch.save(reference, file)
    return reference.order, elements(reference)


def drop_unsteady(reference: WholeRecord, text: str, settings: Settings, device: torch.device = CPU) -> None:
    """Repeat the reference run. Remove from `reference` the hooks' curves that differ between the two runs, e.g. times."""
    if not any(kind == "curve" for step in reference.steps for kind, _ in step):
        return
    with tempfile.TemporaryDirectory() as folder:
        again = record_plain(text, replace(settings, own_folder=settings.own_folder and folder), device)
    for step, second in zip(reference.steps, again.steps, strict=True):
        for key in [key for key in step if key[0] == "curve"]:
            if key not in second or not torch.equal(step[key], second[key]):
                del step[key]


def _compare_on_rank(
    rank: int, world: int, text: str, settings: Settings, file: str, tolerance: float
) -> Comparison:
    logging.disable(logging.WARNING)
    record = record_on_rank(rank, world, text, settings)
    reference: WholeRecord = torch.load(file, weights_only=False, mmap=True)
    if settings.other_folder is not None and settings.steps > 1:
        reference.steps[-2] |= read_whole(settings.other_folder)
    return compare_rank(reference, rank, record, tolerance)
