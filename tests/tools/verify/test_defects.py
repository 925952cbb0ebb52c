"""Each planted defect is found and named, and the same layout without it is equal."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from forge.tools.verify import ranks
from forge.tools.verify.layouts import parse_layouts
from tests.tools.verify.combinations import COMBINATIONS
from tests.tools.verify.defects import DEFECTS, Defect
from tests.tools.verify.plant import is_named, outcome, verifier

pytestmark = pytest.mark.processes


ALL = DEFECTS + COMBINATIONS


@pytest.mark.parametrize(
    "defect",
    [pytest.param(one, id=one.text, marks=() if one.fast else pytest.mark.slow) for one in ALL],
)
def test_a_planted_defect_is_found_and_named(defect: Defect) -> None:
    found = outcome(defect)
    assert found.status == "different", found.error
    assert is_named(defect, found), found.finding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "layout"), sorted({(one.config, one.layout) for one in ALL if one.patch is not None})
)
def test_without_the_defect_the_layout_is_equal(config: str, layout: str) -> None:
    (case,) = parse_layouts(layout)
    found = verifier(config).check(case)
    assert found.status == "equal", found.finding or found.error


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2", "pp=2", "cp=2", "dp_shard=2 data_parallel=zero1"])
def test_a_hook_with_equal_effect_on_every_rank_is_accepted(layout: str) -> None:
    (case,) = parse_layouts(layout)
    found = verifier("good hook").check(case)
    assert found.status == "equal", found.finding or found.error
    assert {"hooked", "curve"} <= found.largest.keys()


@pytest.mark.slow
def test_a_hanging_layout_is_killed_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LIMIT_S", 10.0)
    (case,) = parse_layouts("dp_shard=2")
    found = verifier("dense").patched(hanging).check(case)
    assert found.status == "failed" and "no result within 20 s" in found.error
    assert verifier("dense").check(case).status == "equal"


def test_two_features_meet_in_at_least_half_of_the_defects_and_in_thirty() -> None:
    assert len(COMBINATIONS) >= 30 and 2 * len(COMBINATIONS) >= len(ALL)
    assert all(", " in one.features for one in COMBINATIONS)


def hanging() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()
