"""The search: what it extrapolates is what a whole plan says, what it prints can be pasted, and the best comes first."""

import json
import shlex
from functools import partial

import pytest

from forge.config import check_world, load_config, parse_toml_text
from forge.plan import command
from forge.plan.hardware import Hardware
from forge.plan.plan import make_plan
from forge.plan.search import attempt, extrapolated, least_state, search
from forge.plan.speed import speed_of
from forge.train.launch import main
from tests.support.planning import CPU, plan_text

SLOW = pytest.mark.slow
BARE = CPU.model_copy(update={"reserved_gib": 0.0, "peak_tflops": {"float32": 1.0}})
FULL = '[activation_checkpoint]\nmode = "full"\n'


def deep(parallel: str = "", more: str = "") -> str:
    text = plan_text(parallel).replace("n_layers = 4", "n_layers = 8")
    return text.replace("global_batch_size = 8", "global_batch_size = 16") + more


def staged(schedule: str, layers: int) -> str:
    return deep("pp = 2", f'[pipeline]\nschedule = "{schedule}"\nlayers_per_stage = {layers}\n')


@pytest.mark.parametrize(
    ("text", "world"),
    [
        (deep(), 2),
        pytest.param(deep("reshard_after_forward = 'always'", FULL), 4, marks=SLOW),
        pytest.param(deep("data_parallel = 'zero1'"), 4, marks=SLOW),
        pytest.param(deep("tp = 2", FULL), 4, marks=SLOW),
        pytest.param(staged("1F1B", 4), 4, marks=SLOW),
        pytest.param(staged("Interleaved1F1B", 2), 4, marks=SLOW),
    ],
)
def test_a_few_layers_show_what_all_need(text: str, world: int) -> None:
    config = parse_toml_text(text)
    degrees = check_world(config, world)
    whole = make_plan(config, degrees, BARE)
    memory, times = extrapolated(config, degrees, BARE)
    assert whole.speed is not None
    for kind in memory:
        assert memory[kind] == pytest.approx(whole.worst.memory[kind], rel=0.01), kind
    assert speed_of(config, degrees, times, BARE).step_s == pytest.approx(whole.speed.step_s, rel=0.01)


def with_memory(gib: float) -> Hardware:
    return BARE.model_copy(update={"memory_gib": gib})


@SLOW
def test_layouts_that_fit_come_first_and_the_fastest_before_others() -> None:
    config = parse_toml_text(plan_text())
    found = search(config, 1, BARE, tries=3)
    assert len(found) == 3
    assert [one.speed.step_s for one in found] == sorted(one.speed.step_s for one in found)
    least, *_ = sorted(one.needed for one in found)
    fewer = search(config, 1, with_memory((least + 1) / 2**30), tries=3)
    assert [one.needed for one in fewer] == [least]
    # With too little memory the nearest is returned.
    assert [one.needed > 2**20 for one in search(config, 1, with_memory(1 / 1024), tries=3)] == [True]


def test_a_change_that_does_not_fit_by_its_state_is_not_tried() -> None:
    config = parse_toml_text(plan_text())
    assert attempt(config, 2, with_memory(1e-6), {}, parameters=100_000) is None
    assert least_state(config, check_world(config, 2), 1000) == 1000 * 8 / 2


@SLOW
def test_what_is_printed_can_be_pasted(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(command, "search", partial(search, tries=2))
    (tmp_path / "tiny.toml").write_text(plan_text())
    (tmp_path / "card.toml").write_text(
        "memory_gib = 1.0\nreserved_gib = 0.0\nmemory_gb_per_s = 10\ncards_per_node = 2\n"
        "node = { gb_per_s = 1, latency_us = 10 }\ncluster = { gb_per_s = 1, latency_us = 10 }\n"
    )
    argv = ["--config", str(tmp_path / "tiny.toml"), "--plan", "--world-size=2"]
    assert main([*argv, "--search", "--json", f"--hardware={tmp_path / 'card.toml'}"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert len(layouts) == 2
    for layout in layouts:
        options = shlex.split(" ".join(layout["overrides"]))
        check_world(load_config([*argv[:2], *options]), 2)
