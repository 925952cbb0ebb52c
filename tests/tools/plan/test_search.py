"""The search lists the fastest layouts that fit first; a plan with a row's overrides gives that row."""

import json
import re
import shlex
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from forge.config import check_world, parse_toml_text
from forge.model.transformer import Block
from forge.run.launch import main
from forge.tools.plan import command
from forge.tools.plan.hardware import Hardware, find_hardware
from forge.tools.plan.layers import kinds_of_layers, plan_stages, traced_layers
from forge.tools.plan.layouts import DOUBT, MODES, Model, layouts, least_state, rough_seconds
from forge.tools.plan.search import (
    Corrections,
    _first,
    _in_order,
    _next,
    _promising,
    search,
    usable_bytes,
)
from forge.tools.plan.stage import STATE, plan_stage
from tests.support.planning import CPU, pipeline, plan_text

SLOW = pytest.mark.slow
BARE = CPU.model_copy(update={"reserved_gib": 0.0, "peak_tflops": {"float32": 1.0}})
EXPERTS = "n_kv_heads = 4\n[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 24\n"


def deep(text: str, n_layers: int) -> str:
    return re.sub(r"n_layers = \d+", f"n_layers = {n_layers}", text)


def with_memory(gib: float) -> Hardware:
    return BARE.model_copy(update={"memory_gib": gib})


@SLOW
def test_fitting_layouts_come_first_sorted_by_speed(capsys) -> None:
    config = parse_toml_text(plan_text())
    found = search(config, 1, BARE, tries=3, processes=1)
    assert len(found) == 3
    assert "planned 3 of at most 3 layouts; fastest so far" in capsys.readouterr().err
    assert [one.speed.step_s for one in found] == sorted(one.speed.step_s for one in found)
    least, *_ = sorted(one.needed for one in found)
    fewer = search(config, 1, with_memory((least + 1) / 2**30), tries=3, processes=1)
    assert fewer and all(one.needed <= least for one in fewer)
    # With too little memory the nearest is returned.
    nearest = search(config, 1, with_memory(1 / 8192), tries=3, processes=1)
    assert [one.needed > 2**17 for one in nearest] == [True]


@pytest.mark.long
def test_a_config_whose_patterns_name_layers_by_number_is_searched() -> None:
    config = parse_toml_text(deep(plan_text(), 9))
    precision = config.precision.model_copy(update={"fp32_modules": ("layers.3",)})
    assert search(config.model_copy(update={"precision": precision}), 1, BARE, tries=1, processes=1)


def test_among_equally_fast_layouts_the_fewest_axes_come_first() -> None:
    def found(seconds: float, **degrees: int) -> Any:
        axes = SimpleNamespace(**({"tp": 1, "cp": 1, "ep": 1, "pp": 1} | degrees))
        return SimpleNamespace(speed=SimpleNamespace(step_s=seconds), plan=SimpleNamespace(degrees=axes))

    plain, pipeline, both = found(1.015), found(1.0, pp=4), found(0.999, pp=2, tp=2)
    slow, slower = found(1.03), found(1.04, tp=2)
    assert _in_order([slower, both, slow, pipeline, plain]) == [plain, pipeline, both, slow, slower]
    assert _in_order([]) == []


def test_offload_costs_the_copies_that_computation_does_not_hide() -> None:
    def seconds(mode: str, host_gb_per_s: float) -> float:
        config = parse_toml_text(plan_text() + f'[activation_checkpoint]\nmode = "{mode}"\n')
        hardware = BARE.model_copy(update={"host_gb_per_s": host_gb_per_s})
        return rough_seconds(config, check_world(config, 1), hardware, Model.of(config))

    kept = seconds("none", 1.0)
    assert seconds("offload", 1e6) == kept < seconds("offload", 1e-3) < seconds("offload", 0.9e-3)


def test_some_memory_stays_free() -> None:
    h100 = find_hardware("h100")
    assert usable_bytes(h100) == h100.memory_bytes - 3 * 2**30
    assert usable_bytes(BARE) == pytest.approx(0.95 * BARE.memory_bytes)


@pytest.mark.long
def test_fsdp_with_each_mode_of_recomputation_is_planned_first() -> None:
    left = layouts(parse_toml_text(plan_text("tp = 2")), 4, BARE)
    own, *plain = _first(left)
    assert own.changes == {} and list(dict.fromkeys(layout.mode for layout in plain)) == list(MODES)
    for mode in MODES:
        least, *fastest = [layout for layout in plain if layout.mode == mode]
        assert all(layout.seconds <= least.seconds for layout in fastest) and len(fastest) <= 1
    assert all(layout.is_plain for layout in plain)
    later = _next(left, 4)
    assert later[0] == left[0] and len({layout.sizes for layout in later}) == 4


def test_with_more_gpus_than_sequences_each_mode_is_planned_first_without_a_pipeline(monkeypatch) -> None:
    monkeypatch.setattr("forge.tools.plan.layouts.MOST", 1)
    config = parse_toml_text(plan_text("pp = 2").replace("global_batch_size = 8", "global_batch_size = 2"))
    left = [layout for layout in layouts(config, 4, BARE) if layout.changes]
    assert not any(layout.is_plain for layout in left)
    first = _first(left)
    assert list(dict.fromkeys(layout.mode for layout in first)) == list(MODES)
    assert all(layout.degrees.pp == 1 for layout in first)


@pytest.mark.long
def test_an_interleaved_pipeline_waits_for_the_plain_one_of_its_shapes() -> None:
    left = [one for one in layouts(parse_toml_text(plan_text()), 2, BARE) if one.degrees.pp == 2]
    interleaved = next(one for one in left if one.schedule == "Interleaved1F1B")
    twin = next(one for one in left if one.shapes == interleaved.shapes and one.schedule == "1F1B")
    assert twin.signature != interleaved.signature
    none = Corrections([])
    assert {one.schedule for one in _promising(left, none, BARE)} == {"1F1B"}
    assert interleaved in _promising([one for one in left if one is not twin], none, BARE)


@pytest.mark.parametrize(
    ("text", "world"),
    [
        (plan_text(), 1),
        (deep(plan_text(), 10), 2),
        pytest.param(deep(plan_text("pp = 2"), 12), 2, marks=SLOW),
        pytest.param(deep(pipeline("Interleaved1F1B"), 12), 2, marks=SLOW),
    ],
)
def test_the_cost_of_a_plan_is_its_number_of_traced_layers(text: str, world: int, monkeypatch) -> None:
    ran: list[Block] = []
    forward = Block.forward

    def counted(block: Block, *args: object) -> object:
        ran.append(block)
        return forward(block, *args)

    monkeypatch.setattr(Block, "forward", counted)
    config = parse_toml_text(text)
    degrees = check_world(config, world)
    plan_stages(config, degrees, BARE)
    assert len(ran) == traced_layers(config, degrees)


@pytest.mark.long
def test_a_round_stays_within_its_layers() -> None:
    left = layouts(parse_toml_text(plan_text()), 2, BARE)
    costs = [traced_layers(one.config, one.degrees) for one in _next(left, 8)]
    assert len(costs) >= 4
    few = [traced_layers(one.config, one.degrees) for one in _next(left, 8, min(costs) + max(costs))]
    assert few and sum(few) <= min(costs) + max(costs)
    assert _next(left, 8, 0) == []


@pytest.mark.long
def test_layouts_with_one_gather_per_step_are_tried_for_several_microbatches() -> None:
    ways = _ways(plan_text())
    assert ways == {("auto", False), ("auto", True), ("never", False), ("never", True)}
    assert _ways(plan_text("reshard_after_forward = 'never'\ndefer_gradient_reduction = true")) == ways
    assert all(
        not layout.config.parallel.defer_gradient_reduction
        for layout in layouts(parse_toml_text(plan_text()), 2, BARE)
        if layout.degrees.accumulation == 1
    )


def test_a_number_of_ranks_to_gather_from_leaves_out_no_pipeline_and_no_tp() -> None:
    found = layouts(parse_toml_text(plan_text("reshard_after_forward = 2")), 4, BARE)
    both = {(layout.degrees.pp > 1, layout.degrees.tp > 1) for layout in found if layout.engine == "fsdp2"}
    assert both >= {(False, False), (True, False), (False, True)}


def _ways(text: str) -> set[tuple[str, bool]]:
    """How layouts with fsdp2 and several microbatches gather and reduce."""
    return {
        (layout.config.parallel.reshard_after_forward, layout.config.parallel.defer_gradient_reduction)
        for layout in layouts(parse_toml_text(text), 2, BARE)
        if layout.engine == "fsdp2" and layout.degrees.pp == 1 and layout.degrees.accumulation > 1
    }


@pytest.mark.long
def test_every_layout_is_valid_and_can_hold_its_state() -> None:
    config = parse_toml_text(plan_text())
    found = layouts(config, 4, BARE)
    assert len({str(layout.changes) for layout in found}) == len(found) > 20
    assert {} in [layout.changes for layout in found]
    assert {layout.degrees.tp for layout in found} >= {1, 2} and {layout.degrees.pp for layout in found} >= {
        1,
        2,
        4,
    }
    assert all(check_world(layout.config, 4) == layout.degrees for layout in found)
    assert [layout.seconds for layout in found] == sorted(layout.seconds for layout in found)
    assert layouts(config, 4, with_memory(1e-6)) == []
    assert len(layouts(config, 4, with_memory(1e-6), any_memory=True)) == len(found)


@pytest.mark.parametrize(
    ("parallel", "world", "model", "compute"),
    [
        pytest.param("", 2, "", "float32", marks=SLOW),
        pytest.param("tp = 2\ndata_parallel = 'zero1'", 4, "", "float32", marks=SLOW),
        pytest.param("data_parallel = 'zero2'", 2, "", "float32", marks=SLOW),
        # Masters beside parameters in bfloat16.
        pytest.param("data_parallel = 'ddp'", 2, "", "bfloat16", marks=SLOW),
        pytest.param("data_parallel = 'zero1'", 2, "", "bfloat16", marks=SLOW),
        pytest.param(
            "ep = 2\ndata_parallel = 'zero2'\nbucket_size = 1000", 4, EXPERTS, "bfloat16", marks=SLOW
        ),
        pytest.param("pp = 2", 4, "", "float32", marks=SLOW),
        pytest.param("ep = 2\ndp_replicate = 2", 4, EXPERTS, "float32", marks=SLOW),
    ],
)
def test_least_state_is_a_lower_bound_of_the_plan(
    parallel: str, world: int, model: str, compute: str
) -> None:
    text = plan_text(parallel, model=model).replace('compute = "float32"', f'compute = "{compute}"')
    assert f'compute = "{compute}"' in text
    config = parse_toml_text(text.replace("n_kv_heads = 2\n", "") if model else text)
    degrees = check_world(config, world)
    # The pipeline rank with the highest peak.
    planned = max(
        sum(plan_stage(config, degrees, rank, BARE).state[kind] for kind in STATE)
        for rank in range(degrees.pp)
    )
    assert 0.7 * planned < least_state(config, degrees, Model.of(config)) <= planned


def test_estimates_of_unplanned_layouts_are_corrected_by_plans() -> None:
    first, second, *_ = layouts(parse_toml_text(plan_text()), 1, BARE)
    none = Corrections([])
    assert none.seconds(first) == first.seconds
    assert none.bytes(second) == second.state + second.activations
    assert none.least_bytes(second) == second.state + second.activations / DOUBT
    assert kinds_of_layers(first.config) == [0] * 4


def test_a_plan_with_a_pipeline_corrects_other_pipelines_first() -> None:
    def planned(layout: Any, factor: float) -> Any:
        """Return a plan that takes `factor` times the estimated seconds and activations."""
        speed = SimpleNamespace(step_s=factor * layout.seconds)
        worst = SimpleNamespace(state={"parameters": layout.state})
        needed = layout.state + factor * layout.activations
        return layout, SimpleNamespace(speed=speed, needed=needed, plan=SimpleNamespace(worst=worst))

    left = [one for one in layouts(parse_toml_text(plan_text()), 4, BARE) if one.mode == "none"]
    kinds = [[one for one in left if (one.degrees.pp > 1) is piped] for piped in (False, True)]
    factors = (1.5, 3.0)
    corrected = Corrections([planned(kind[0], factor) for kind, factor in zip(kinds, factors, strict=True)])
    for kind, factor in zip(kinds, factors, strict=True):
        others = [one for one in kind if one.sizes != kind[0].sizes]
        assert others
        for one in others:
            assert corrected.seconds(one) == pytest.approx(factor * one.seconds)
            assert corrected.bytes(one) == pytest.approx(one.state + factor * one.activations)


@SLOW
@pytest.mark.processes
def test_each_layout_matches_a_plan_with_its_overrides(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(command, "search", partial(search, tries=3))
    (tmp_path / "tiny.toml").write_text(plan_text().replace("n_layers = 4", "n_layers = 10"))
    (tmp_path / "card.toml").write_text(
        "memory_gib = 1.0\nreserved_gib = 0.0\nmemory_gb_per_s = 10\ncards_per_node = 2\n"
        "node = { gb_per_s = 1, latency_us = 10 }\ncluster = { gb_per_s = 1, latency_us = 10 }\n"
    )
    argv = ["--config", str(tmp_path / "tiny.toml"), "--plan", "--world-size=2"]
    argv += [f"--hardware={tmp_path / 'card.toml'}", "--json"]
    assert main([*argv, "--search"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert len(layouts) == 3
    for layout in layouts:
        assert main([*argv, *shlex.split(" ".join(layout.pop("overrides")))]) == 0
        assert json.loads(capsys.readouterr().out) == layout
