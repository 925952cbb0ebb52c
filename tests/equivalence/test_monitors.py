"""Monitor values equal one process on every layout, to 1e-9 in float64, and monitors remove all their hooks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from forge.config import check_world, parse_toml_text
from forge.parallel.build import build_parallel_model
from forge.parallel.mesh import make_meshes
from forge.parallel.step.gradients import clip_gradients, report_gradients
from forge.tools.verify.ranks import run_ranks
from forge.tools.verify.record import Settings, batches
from forge.train.monitor import make_monitors
from tests.support.equivalence import tiny_config

CPU = torch.device("cpu")
MOE = """
tie_embeddings = true
attention_soft_cap = 20.0
sliding_window = 24
sliding_window_pattern = 2
[model.moe]
n_experts = 4
top_k = 2
expert_dim = 16
n_shared_experts = 2
n_dense_layers = 1
"""
DENSE = "qk_norm = true"
LATENT = """
attention = "mla"
[model.mla]
q_lora_rank = 12
kv_lora_rank = 10
qk_nope_head_dim = 6
qk_rope_head_dim = 4
v_head_dim = 5
"""
CLIPPED = '[optimizer]\nname = "muon"\nmuon = { qk_clip = 100.0 }'


def monitored(rank: int, world: int, text: str) -> dict[str, Any]:
    """Train two steps of gradient descent; return the second step's monitors."""
    config = parse_toml_text(text)
    meshes = make_meshes(check_world(config, world), "cpu")
    model = build_parallel_model(config, meshes, CPU)
    monitors = make_monitors(config, model, meshes, CPU)
    untouched = watched_places(model)
    found = []
    for batch in batches(config, meshes.data_rank, meshes.data_ranks, Settings(steps=2)):
        monitors.begin()
        sums = model.forward_backward(batch, model.count_tokens(batch))
        model.finalize_gradients()
        monitors.remove()
        assert watched_places(model) == untouched
        monitors.count_gradients(model.shards)
        report = report_gradients(model.shards, sums.objective, stop=False)
        clip_gradients(model.shards, report.norm, 0.3)
        monitors.before_update(model.shards)
        for shard in model.shards:
            if shard.grad is not None:
                shard.data.sub_(0.5 * shard.grad)
        model.after_update()
        monitors.after_update(model.shards)
        model.update_router(report.skip)
        model.zero_gradients()
        found.append(monitors.read(monitors.reduce().tolist()))
    return found[-1]


def watched_places(model: Any) -> list[Any]:
    """Return all attributes and hook lists changed by active monitors."""
    modules = [module for part in model.parts for module in part.modules()]
    return [(len(m._forward_hooks), getattr(m, "attend", None), getattr(m, "route", None)) for m in modules]


def flat(found: Any, before: str = "") -> dict[str, float]:
    if not isinstance(found, dict):
        return {before: found}
    return {name: value for key, one in found.items() for name, value in flat(one, f"{before}/{key}").items()}


@functools.cache
def alone(model: str) -> dict[str, float]:
    """Return the values of one process with one microbatch."""
    (found,) = run_ranks(monitored, 1, tiny_config(model=model, micro=8))
    return flat(found)


def assert_same(parallel: str, model: str, world: int, micro: int = 1) -> None:
    wanted = alone(model)
    ranks = [
        flat(found)
        for found in run_ranks(monitored, world, tiny_config(parallel=parallel, model=model, micro=micro))
    ]
    assert all(found == ranks[0] for found in ranks), "ranks disagree"
    assert list(ranks[0]) == list(wanted)
    for name, value in wanted.items():
        assert ranks[0][name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_one_process_reports_every_layer_and_parameter() -> None:
    found = alone(MOE)
    groups = {name.split("/")[1] for name in found}
    assert groups == {"activations", "units", "attention", "experts", "gradients", "weights", "updates"}
    layers = {name.split("/")[2] for name in found if name.startswith("/activations/")}
    assert layers == {"0", "1", "2"}
    assert {name.split("/")[2] for name in found if name.startswith("/experts/")} == {"1", "2"}
    assert all(value is not None and abs(value) < 1e3 for value in found.values())
    assert 0 < found["/experts/1/score_entropy"] <= 1 and found["/attention/0/entropy"] > 0
    assert all(value > 0 for name, value in found.items() if name.startswith("/updates/"))


@pytest.mark.parametrize(
    "parallel",
    [
        "tp = 2\npp = 2",
        pytest.param(
            'cp = 2\ntp = 2\nsequence_parallel = false\ndata_parallel = "ddp"', marks=pytest.mark.slow
        ),
        'ep = 2\ntp = 2\ndata_parallel = "fsdp2"',
        pytest.param('data_parallel = "zero2"', marks=pytest.mark.slow),
        pytest.param('ep = 4\ndata_parallel = "zero1"', marks=pytest.mark.slow),
        pytest.param('cp = 2\ncontext = "ring"\ndp_replicate = 2', marks=pytest.mark.slow),
        pytest.param('cp = 2\ncontext = "ulysses"\npp = 2', marks=pytest.mark.slow),
    ],
)
def test_a_mixture_of_experts_on_any_layout(parallel: str) -> None:
    assert_same(parallel, MOE, 4)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        pytest.param("attention_bias = true", "", marks=pytest.mark.slow, id="grouped-plain"),
        pytest.param("attention_bias = true", CLIPPED, id="grouped-clipped logits"),
        pytest.param(LATENT, "", id="latent-plain"),
        pytest.param(LATENT, CLIPPED, marks=pytest.mark.slow, id="latent-clipped logits"),
    ],
)
def test_attention_over_parts_of_a_sequence(model: str, more: str) -> None:
    assert_same(f"cp = 2\n{more}", model, 2)


@pytest.mark.parametrize(
    ("parallel", "more", "micro"),
    [
        ("", "", 2),
        pytest.param("tp = 2", '[activation_checkpoint]\nmode = "full"', 4, marks=pytest.mark.slow),
        ("tp = 2", '[activation_checkpoint]\nmode = "selective"', 4),
        pytest.param("", '[activation_checkpoint]\nmode = "selective"\nevery = 2', 2, marks=pytest.mark.slow),
        pytest.param(
            "pp = 2",
            '[pipeline]\nschedule = "1F1B"',
            2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_accumulation_and_recomputation(parallel: str, more: str, micro: int) -> None:
    assert_same(parallel + "\n" + more, DENSE, 2, micro)


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_compiled_routers(mode: str) -> None:
    """Compiled blocks have no monitors of attention and of units. The others are those of eager blocks."""
    compiled = f'[compile]\nenabled = true\nbackend = "aot_eager"\n[activation_checkpoint]\nmode = "{mode}"\n'
    (found,) = run_ranks(monitored, 1, tiny_config(model=MOE + compiled, micro=8))
    values = flat(found)
    assert any(name.startswith("/experts") for name in values)
    wanted = {
        name: value for name, value in alone(MOE).items() if name.split("/")[1] not in ("attention", "units")
    }
    assert values == pytest.approx(wanted, rel=1e-9, abs=1e-12)
