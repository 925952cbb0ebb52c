"""Each planted defect is found and named, and the same layout without it is equal."""

from __future__ import annotations

import functools
import re
import threading

import pytest
import torch.distributed as dist

from forge.config import parse_toml_text
from forge.tools.verify import ranks
from forge.tools.verify.layouts import parse_layouts
from forge.tools.verify.record import Settings
from forge.tools.verify.run import Outcome, Verifier
from forge.tools.verify.shrink import shrink
from tests.tools.verify.defects import CONFIGS, DEFECTS, Defect

pytestmark = pytest.mark.processes


@functools.cache
def verifier(config: str) -> Verifier:
    """Computes the reference of a config once."""
    small, _ = shrink(parse_toml_text(CONFIGS[config]))
    return Verifier(small, Settings(lr=0.01, borders=True, uneven=True))


def outcome(defect: Defect) -> Outcome:
    (case,) = parse_layouts(defect.layout)
    without = verifier(defect.config)
    if defect.origin:
        without = verifier.__wrapped__(defect.config)  # one that has checked nothing else
        (origin,) = parse_layouts(defect.origin)
        without.check(origin)
        assert without.other == origin
    return without.patched(defect.patch).check(case)


@pytest.mark.parametrize(
    "defect",
    [pytest.param(one, id=one.text, marks=() if one.fast else pytest.mark.slow) for one in DEFECTS],
)
def test_a_planted_defect_is_found_and_named(defect: Defect) -> None:
    found = outcome(defect)
    assert found.status == "different", found.error
    assert found.finding is not None
    named = found.finding.culprit, found.finding.difference.kind
    assert re.fullmatch(defect.culprit, named[0]) and named[1] == defect.kind, found.finding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "layout"), sorted({(one.config, one.layout) for one in DEFECTS if one.patch is not None})
)
def test_without_the_defect_the_layout_is_equal(config: str, layout: str) -> None:
    (case,) = parse_layouts(layout)
    found = verifier(config).check(case)
    assert found.status == "equal", found.finding or found.error


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2", "pp=2", "cp=2", "dp_shard=2 data_parallel=zero1"])
def test_a_hook_that_is_the_same_on_every_rank_is_no_difference(layout: str) -> None:
    (case,) = parse_layouts(layout)
    found = verifier("good hook").check(case)
    assert found.status == "equal", found.finding or found.error
    assert {"hooked", "curve"} <= found.largest.keys()


@pytest.mark.slow
def test_a_layout_that_hangs_is_ended_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LIMIT_S", 10.0)
    (case,) = parse_layouts("dp_shard=2")
    found = verifier("dense").patched(hanging).check(case)
    assert found.status == "failed" and "nothing within 20 s" in found.error
    assert verifier("dense").check(case).status == "equal"


def hanging() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()
