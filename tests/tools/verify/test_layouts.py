"""Layouts cover every axis and every pair, random ones are valid, and their text is parsed correctly."""

import itertools

import pytest

from forge.config import check_world
from forge.runtime.errors import UserError
from forge.tools.verify.layouts import (
    AXES,
    Case,
    at_random,
    parse_layouts,
    require_any,
    systematic,
    why_illegal,
)
from forge.tools.verify.shrink import changed, shrink
from tests.support.configs import tiny

SMALL = shrink(tiny())[0]
MIXED = changed(SMALL, {"model.moe.n_experts": 8})


@pytest.mark.parametrize("config", [SMALL, MIXED], ids=["dense", "experts"])
def test_every_axis_and_every_pair_of_axes_is_covered(config) -> None:
    cases = list(systematic(config, [1, 2, 4]))
    assert cases[0] == Case() and len(set(cases)) == len(cases)
    covered = {axes for case in cases for axes in itertools.combinations(sorted(dict(case.degrees)), 2)}
    axes = [axis for axis in AXES if axis != "ep" or config.model.moe is not None]
    assert covered == set(itertools.combinations(sorted(axes), 2))
    assert all(why_illegal(config, case) is None for case in cases)


@pytest.mark.long
def test_layouts_at_random_are_legal_different_and_the_same_for_a_seed() -> None:
    cases = list(itertools.islice(at_random(MIXED, [2, 4], seed=1), 50))
    assert len(set(cases)) == 50 and {case.world for case in cases} == {2, 4}
    for case in cases:
        check_world(case.config(MIXED), case.world)
    assert cases == list(itertools.islice(at_random(MIXED, [2, 4], seed=1), 50))
    assert cases != list(itertools.islice(at_random(MIXED, [2, 4], seed=2), 50))


def test_few_layouts_end_a_draw() -> None:
    only_data = changed(
        SMALL, {"model.n_layers": 1, "model.n_heads": 1, "model.n_kv_heads": 1, "model.head_dim": 8}
    )
    assert len(list(at_random(only_data, [3], seed=0))) == 0


@pytest.mark.parametrize(
    "text", ["cp=2 tp=2", "dp_shard=2 tp=2 ep=4 context=ring", "one process", "pp=2 pipeline.schedule=GPipe"]
)
def test_the_name_of_a_layout_reads_back(text: str) -> None:
    (case,) = parse_layouts(text)
    assert case.name == text


def test_experts_over_more_ranks_than_named_get_them_from_dp_shard() -> None:
    (case,) = parse_layouts("ep=4 pp=2")
    assert case == Case.of({"dp_shard": 4, "ep": 4, "pp": 2}) and case.world == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tq=2", "dp_shard, dp_replicate"),
        ("tp", "KEY=VALUE"),
        ("tp=0", "whole number"),
        ("tp=two", "whole number"),
        (" ; ", "no layout given"),
        ("pp=2 pipeline.layers_per_stage=[2,2]", "must be one value"),
        ("pp=2 pipeline.layers_per_stage=[2, 2]", "must be one value"),
    ],
)
def test_an_ambiguous_or_impossible_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_layouts(text)


def test_a_number_of_processes_without_a_layout_is_refused() -> None:
    for world in (1, 2, 16):
        require_any(SMALL, world)
    with pytest.raises(UserError, match="no layout of 7 processes fits this configuration; dp_shard=7: "):
        require_any(SMALL, 7)


def test_what_the_configuration_refuses_is_reported_with_its_reason() -> None:
    reason = why_illegal(SMALL, Case.of({"tp": 3}))
    assert reason is not None and "must divide model.n_kv_heads" in reason


def test_a_smaller_layout_lacks_an_option_or_a_degree() -> None:
    case = Case.of({"tp": 4, "cp": 2}, {"parallel.context": "ring"})
    assert [one.name for one in case.smaller()] == [
        "cp=2 tp=4",
        "tp=4 context=ring",
        "cp=2 context=ring",
        "cp=2 tp=2 context=ring",
    ]
