"""The order of layouts, the time budget, and the search for the smallest differing layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

from forge.tools.verify import run
from forge.tools.verify.compare import Difference
from forge.tools.verify.explain import Finding
from forge.tools.verify.layouts import Case, at_random, parse_layouts, systematic
from forge.tools.verify.run import Outcome, Verifier, verify
from forge.tools.verify.shrink import shrink
from tests.support.configs import tiny

SMALL = shrink(tiny())[0]
FINDING = Finding("layers.0", "why", Difference(1, "output", "layers.0", 0, (), 1.0, 2.0, 1.0))


class Fake(Verifier):
    """A verifier with a given `status` for each layout. Each layout takes one second of `clock`."""

    def __init__(self, status: Callable[[Case], str], monkeypatch: pytest.MonkeyPatch):
        self.config, self._known, self.ran, self.other = SMALL, {}, [], Case()
        self._status, self.clock = status, 0.0
        monkeypatch.setattr(run.time, "monotonic", lambda: self.clock)

    def _run(self, case: Case, other: Case, keep: bool = False) -> Outcome:
        self.clock += 1.0
        self.ran.append(case)
        status = self._status(case)
        differs = status == "different"
        size = float(len(case.degrees)) if differs else 0.0
        return Outcome(case, status, 1.0, {"output": size}, finding=FINDING if differs else None)  # type: ignore[arg-type]


def equal(case: Case) -> str:
    return "equal"


def with_tp(case: Case) -> str:
    return "different" if dict(case.degrees).get("tp", 1) > 1 else "equal"


def test_every_axis_and_pair_comes_first_and_the_rest_of_the_time_goes_to_random_layouts(monkeypatch) -> None:
    fake = Fake(equal, monkeypatch)
    report = verify(fake, None, worlds=[1, 2, 4], seconds=60.0, seed=3)
    first = list(systematic(SMALL, [1, 2, 4]))
    drawn = (case for case in at_random(SMALL, [1, 2, 4], 3) if case not in first)
    assert [one.case for one in report.outcomes] == [*first, *itertools.islice(drawn, 60 - len(first))]
    assert not report.bad and report.worst is None and report.not_reached == 0


def test_as_many_random_layouts_as_were_asked_for(monkeypatch) -> None:
    report = verify(Fake(equal, monkeypatch), None, worlds=[1, 2], random=5, seconds=inf)
    assert len(report.outcomes) == len(list(systematic(SMALL, [1, 2]))) + 5


def test_random_layouts_that_do_not_exist_are_counted_if_asked_for(monkeypatch) -> None:
    report = verify(Fake(equal, monkeypatch), None, worlds=[1], random=500, seconds=inf)
    missing = len(list(systematic(SMALL, [1]))) + 500 - len(report.outcomes)
    assert report.not_found == missing > 0 and not report.bad
    assert f"--random asks for {missing} layouts more" in (report.missing(None, [1], random=500) or "")


def test_random_layouts_beyond_the_time_budget_are_counted_if_asked_for(monkeypatch) -> None:
    systematically = len(list(systematic(SMALL, [1, 2])))
    seconds = systematically + 2.0
    report = verify(Fake(equal, monkeypatch), None, worlds=[1, 2], random=5, seconds=seconds)
    assert report.not_reached == 3 and "for 3 of them" in (report.missing(None, [], random=5) or "")
    report = verify(Fake(equal, monkeypatch), None, worlds=[1, 2], seconds=seconds)
    assert report.not_reached == 0 and report.missing(None, []) is None


def test_layouts_beyond_the_time_budget_are_counted(monkeypatch) -> None:
    report = verify(Fake(equal, monkeypatch), None, worlds=[1, 2, 4], seconds=10.0)
    assert len(report.outcomes) == 10
    assert report.not_reached == len(list(systematic(SMALL, [1, 2, 4]))) - 10


def test_the_smallest_differing_layout_is_found_and_no_random_one_is_drawn(monkeypatch) -> None:
    fake = Fake(with_tp, monkeypatch)
    cases = parse_layouts("dp_shard=2 cp=2 tp=4 context=ring; dp_shard=2")
    report = verify(fake, cases, seconds=100.0)
    assert report.worst is not None and report.worst.case == cases[0]
    assert report.smallest is not None and report.smallest.case.name == "tp=2"
    assert verify(Fake(with_tp, monkeypatch), None, worlds=[1, 2], seconds=inf).bad  # ends


class FakeLoads(Fake):
    """Make pp layouts differ after loading a checkpoint of a tp layout."""

    def _run(self, case: Case, other: Case, keep: bool = False) -> Outcome:
        loads = "tp" in dict(other.degrees) and "pp" in dict(case.degrees)
        found = super()._run(case, other, keep)
        self.other = case if keep else self.other
        kind = Difference(2, "loaded", "embedding.weight", 0, (), 1.0, 2.0, 1.0)
        finding = Finding("embedding.weight", "why", kind) if loads else None
        return replace(found, status="different" if loads else "equal", finding=finding, other=other)


def test_an_unloadable_checkpoint_is_searched_with_its_saving_layout(monkeypatch) -> None:
    fake = FakeLoads(equal, monkeypatch)
    cases = parse_layouts("pp=2; tp=2; cp=2 pp=2")
    report = verify(fake, cases, seconds=100.0)
    assert [one.case for one in report.bad] == [cases[2]]
    # Alone, with the checkpoint of one process, it was equal before.
    assert report.smallest is not None and report.smallest.case.name == "pp=2"
    assert report.smallest.other.name == "tp=2"


def test_the_search_ends_with_the_time(monkeypatch) -> None:
    fake = Fake(with_tp, monkeypatch)
    report = verify(fake, parse_layouts("dp_shard=2 cp=2 tp=4 context=ring"), seconds=1.5)
    assert report.smallest is not None and len(fake.ran) <= 2


def test_a_disallowed_layout_is_reported_and_not_run(monkeypatch) -> None:
    fake = Fake(equal, monkeypatch)
    report = verify(fake, parse_layouts("tp=3; tp=2"), seconds=100.0)
    assert [case.name for case, _ in report.refused] == ["tp=3"] and [one.name for one in fake.ran] == [
        "tp=2"
    ]
