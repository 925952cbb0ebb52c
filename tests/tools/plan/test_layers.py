"""A trace of a few layers, ranks and microbatches extrapolates to all of them."""

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from forge.config import check_world, parse_toml_text
from forge.config.patterns import names_layers
from forge.tools.plan import fake, layers
from forge.tools.plan.growth import Growth, _calls
from forge.tools.plan.hardware import Hardware
from forge.tools.plan.layers import few_layers, kinds_of_layers, plan_stages, with_experts_first
from forge.tools.plan.speed import speed_of
from forge.tools.plan.stage import StagePlan
from tests.support.planning import CPU, plan_text

SLOW = pytest.mark.slow
BARE = CPU.model_copy(update={"reserved_gib": 0.0, "peak_tflops": {"float32": 1.0}})
FULL = '[activation_checkpoint]\nmode = "full"\n'
OFFLOAD = '[activation_checkpoint]\nmode = "offload"\n'
EXPERTS = "n_kv_heads = 4\n[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 24\nn_dense_layers = 1\n"


# Kimi K3's parts: a dense layer, then periods of four, then one layer more of the last kind.
K3 = """n_kv_heads = 4
residual = "attention"
residual_block_size = 6
attention = "mla"
attention_gate = "element"
activation = "situ"
layer_pattern = [PATTERN]
[model.mla]
q_lora_rank = 12
kv_lora_rank = 8
qk_nope_head_dim = 8
qk_rope_head_dim = 4
v_head_dim = 8
[model.linear_attention]
kind = "kimi_delta"
n_key_heads = 4
key_head_dim = 8
full_rank_gate = true
decay_bound = 5.0
[model.moe]
n_experts = 4
top_k = 2
n_shared_experts = 1
expert_dim = 24
latent_dim = 16
n_dense_layers = 1
score_function = "sigmoid"
balance = "quantile"
""".replace("PATTERN", '"linear", "linear", "linear", "nope", ' * 6 + '"nope"')
DENSE_RESIDUALS = "residual = 'attention'\nresidual_block_size = 4\n"
QK_CLIP = '\n[optimizer]\nname = "muon"\n[optimizer.muon]\nqk_clip = 100\n'
TIED = "[model]\ntie_embeddings = true"
AHEAD = "[model.mtp]\ndepth = 2\n"
MUON = '\n[optimizer]\nname = "muon"\n'
INT8 = '\n[optimizer]\nmoment_dtype = "int8"\n'


def deep(parallel: str = "", more: str = "", layers: int = 8, model: str = "") -> str:
    text = plan_text(parallel, model=model).replace("n_layers = 4", f"n_layers = {layers}")
    text = text.replace("n_kv_heads = 2\n", "") if "n_kv_heads = 4" in model else text
    return text.replace("global_batch_size = 8", "global_batch_size = 16") + more


def staged(schedule: str, parallel: str, stages: int, more: str = "") -> str:
    pipeline = f'[pipeline]\nschedule = "{schedule}"\nlayers_per_stage = 4\n'
    return deep(parallel, pipeline + more, layers=4 * stages)


def both(text: str, world: int, hardware: Hardware = BARE) -> tuple[list[StagePlan], list[StagePlan]]:
    """From a few layers, and from all."""
    config = parse_toml_text(text)
    degrees = check_world(config, world)
    assert few_layers(config, degrees) is not None
    few = plan_stages(config, degrees, hardware)
    with patch.object(layers, "few_layers", lambda *_: None):
        return few, plan_stages(config, degrees, hardware)


def totals(stage: StagePlan, *, sizes: bool = True) -> dict[tuple[str, str], int]:
    """Bytes, or calls, by axis and kind."""
    found: Counter[tuple[str, str]] = Counter()
    for (axis, kind, size, _), number in stage.collectives.items():
        found[axis, kind] += number * (size if sizes else 1)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "world"),
    [
        (deep(), 2),
        pytest.param(deep("reshard_after_forward = 'always'", FULL), 4, marks=SLOW),
        pytest.param(deep("data_parallel = 'zero1'\nbucket_size = 30000"), 4, marks=SLOW),
        pytest.param(deep("tp = 2", FULL), 4, marks=SLOW),
        pytest.param(deep(more=FULL + "every = 2\n"), 2, marks=SLOW),
        pytest.param(deep("tp = 2", OFFLOAD), 4, marks=SLOW),
        pytest.param(deep(more=OFFLOAD + "every = 3\n", layers=16), 2, marks=SLOW),
        pytest.param(deep("ep = 2", FULL, model=EXPERTS), 4, marks=SLOW),
        pytest.param(deep(model="sliding_window = 16\nsliding_window_pattern = 2\n"), 2, marks=SLOW),
        pytest.param(deep(more=MUON), 4, marks=SLOW),
        pytest.param(deep("data_parallel = 'zero1'\nbucket_size = 30000", MUON), 4, marks=SLOW),
        pytest.param(deep("tp = 2", INT8), 4, marks=SLOW),
        pytest.param(deep(model=AHEAD), 2, marks=SLOW),
        pytest.param(deep(more=FULL, layers=22, model=DENSE_RESIDUALS), 2, marks=SLOW),
        pytest.param(deep("ep = 2", FULL, 25, K3), 2, marks=SLOW),
        pytest.param(deep("ep = 2", FULL + QK_CLIP, 25, K3), 4, marks=SLOW),
        pytest.param(deep("ep = 2", layers=25, model=K3), 2, marks=SLOW),
        pytest.param(staged("1F1B", "pp = 2", 2, MUON), 4, marks=SLOW),
        pytest.param(staged("1F1B", 'pp = 4\ndata_parallel = "zero1"', 4), 8, marks=SLOW),
        pytest.param(staged("1F1B", "pp = 2", 2), 4, marks=SLOW),
        pytest.param(deep("pp = 2", "[pipeline]\nschedule = '1F1B'\n", layers=7), 4, marks=SLOW),
        pytest.param(staged("1F1B", "pp = 2", 2).replace("[model]", TIED), 2, marks=SLOW),
        pytest.param(staged("1F1B", "pp = 4", 4, FULL), 4, marks=SLOW),
        pytest.param(staged("1F1B", "pp = 4", 4, MUON), 8, marks=SLOW),
        pytest.param(staged("1F1B", "pp = 4\nreshard_after_forward = 'always'", 4), 8, marks=SLOW),
        pytest.param(
            staged("1F1B", "pp = 4", 4).replace("global_batch_size = 16", "global_batch_size = 8"),
            8,
            marks=SLOW,
        ),
        pytest.param(staged("Interleaved1F1B", "pp = 4", 8, MUON), 8, marks=SLOW),
        pytest.param(staged("1F1B", "pp = 4\ntp = 2", 4), 8, marks=SLOW),
        pytest.param(staged("Interleaved1F1B", "pp = 2", 4), 4, marks=SLOW),
        pytest.param(staged("Interleaved1F1B", "pp = 4", 8, FULL), 8, marks=SLOW),
    ],
)
def test_a_few_traced_layers_predict_all(text: str, world: int) -> None:
    few, whole = both(text, world)
    config = parse_toml_text(text)
    for one, other in zip(few, whole, strict=True):
        assert one.state == other.state
        if one.buckets:  # buckets differ in size; the plan knows their mean
            assert totals(one, sizes=False) == totals(other, sizes=False)
            assert totals(one) == pytest.approx(totals(other), rel=0.01)
        else:
            assert one.collectives == other.collectives
        assert (one.checkpoint, one.buckets) == (other.checkpoint, other.buckets)
        assert one.host == pytest.approx(
            other.host, rel=0.01
        )  # a tensor's name decides which of its ranks saves it
        assert one.flops == pytest.approx(other.flops)
        assert one.layers == other.layers and one.rank == other.rank
        assert one.peak.size == pytest.approx(other.peak.size, rel=0.01)
        assert one.kept == pytest.approx(other.kept, rel=0.01)
    degrees = check_world(config, world)
    seconds = [
        speed_of(config, degrees, [stage.times for stage in stages if stage.times], BARE).step_s
        for stages in (few, whole)
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)


@pytest.mark.parametrize(
    ("text", "world"),
    [
        (deep(more=OFFLOAD), 1),
        pytest.param(deep("tp = 2", OFFLOAD + "every = 2\n", layers=12), 2, marks=SLOW),
        pytest.param(deep("pp = 3", "[pipeline]\nschedule = '1F1B'\n" + OFFLOAD, layers=18), 3, marks=SLOW),
    ],
)
def test_a_few_traced_layers_predict_offloaded_bytes(text: str, world: int, monkeypatch) -> None:
    monkeypatch.setattr(fake, "LEAST", 0)
    gpu = BARE.model_copy(update={"card": "any"})
    for one, other in zip(*both(text, world, gpu), strict=True):
        assert one.offloaded == pytest.approx(other.offloaded, rel=0.01) and one.offloaded > 0
        assert one.peak.size == pytest.approx(other.peak.size, rel=0.01)
        for mine, its in zip(one.times or (), other.times or (), strict=True):
            assert (
                mine.forward[0].host == pytest.approx(its.forward[0].host, rel=0.01)
                and mine.forward[0].host > 0
            )
            assert mine.backward[0].host == pytest.approx(its.backward[0].host, rel=0.01)
            assert mine.backward[0].host < mine.forward[0].host, "the last layer is not fetched"


def test_calls_whose_sizes_grow_with_the_layers_keep_their_own_sizes() -> None:
    def traced(*sizes: int) -> Any:
        return SimpleNamespace(
            collectives=Counter({("dp_shard", "all_reduce", size, False): 1 for size in sizes})
        )

    growth = Growth(traced(10, 100, 7), traced(12, 110, 7), steps=3, of_peaks=3, of_kept=3)
    calls = _calls([growth], None)
    assert {key[2]: number for key, number in calls.items()} == {18: 1, 140: 1, 7: 1}


def test_layers_are_of_one_kind_if_nothing_but_their_place_differs() -> None:
    assert kinds_of_layers(parse_toml_text(deep())) == [0] * 8
    windows = "sliding_window = 16\nsliding_window_pattern = 3\n"
    assert kinds_of_layers(parse_toml_text(deep(model=windows))) == [0, 0, 1, 0, 0, 1, 0, 0]
    assert kinds_of_layers(parse_toml_text(deep(model=EXPERTS))) == [0] + [1] * 7


@pytest.mark.parametrize(
    ("text", "world", "sizes"),
    [
        (deep(), 1, (2, 3)),
        (deep(layers=3), 1, None),
        (deep(model=EXPERTS), 1, (3, 4)),
        (deep(model="sliding_window = 16\nsliding_window_pattern = 3\n", layers=12), 1, (6, 9)),
        (deep(layers=22, model=DENSE_RESIDUALS), 1, (7, 8)),
        (deep(layers=25, model=K3), 1, (9, 13)),
        (staged("1F1B", "pp = 4", 4), 4, (6, 9)),
        (staged("Interleaved1F1B", "pp = 2", 4), 2, (8, 12)),
        (staged("GPipe", "pp = 2", 2), 2, None),
    ],
)
def test_as_few_layers_as_show_all_kinds(text: str, world: int, sizes: tuple[int, int] | None) -> None:
    config = parse_toml_text(text)
    found = few_layers(config, check_world(config, world))
    assert (found and tuple(one.layers for one in found)) == sizes


@pytest.mark.parametrize(
    ("pattern", "few"), [("*.wq", True), ("layers.*.wq", True), ("layers.[2-4]", False), ("layers.3", False)]
)
def test_all_layers_are_traced_if_a_pattern_names_some_by_number(pattern: str, few: bool) -> None:
    config = parse_toml_text(deep(layers=9))
    precision = config.precision.model_copy(update={"fp32_modules": (pattern,)})
    config = config.model_copy(update={"precision": precision})
    assert (few_layers(config, check_world(config, 1)) is not None) == few


def test_a_block_of_multi_token_prediction_is_named_by_number() -> None:
    config = parse_toml_text(deep(layers=9, model=AHEAD))
    for pattern, named in (("layers.9.*", True), ("layers.99.*", False)):
        precision = config.precision.model_copy(update={"fp32_modules": (pattern,)})
        assert names_layers(config.model_copy(update={"precision": precision})) == named


@pytest.mark.parametrize("model", ["tie_embeddings = true\n", AHEAD])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_weights_of_both_ends_of_a_pipeline_are_sent_once_in_a_step(model: str, schedule: str) -> None:
    """16 microbatches, of which fewer are traced."""
    text = deep("pp = 2", f"[pipeline]\nschedule = '{schedule}'\n", layers=4, model=model)
    config = parse_toml_text(text.replace("micro_batch_size = 2", "micro_batch_size = 1"))
    first, last = plan_stages(config, check_world(config, 2), BARE)
    size = 4 * config.model.vocab_size * config.model.dim
    for stage, sent, received in ((first, "send", "recv"), (last, "recv", "send")):
        found = {kind: n for (_, kind, of, _), n in stage.collectives.items() if of == size}
        assert found == {sent: 1, received: 1}, "the weights to the last stage, their gradient to the first"
        assert stage.times and stage.times[1].update.waiting > 0


def test_dense_first_layers_of_a_deep_pipeline_are_planned_like_the_others() -> None:
    """All layers would have to be traced: few_layers needs those of a pipeline to be of one kind."""

    def planned(parallel: str, layers: int, world: int) -> list[int]:
        config = parse_toml_text(deep(parallel, "[pipeline]\nschedule = '1F1B'\n", layers, EXPERTS))
        return kinds_of_layers(with_experts_first(config, check_world(config, world)))

    assert planned("pp = 2", 8, 2) == [0] * 8
    # One process traces the dense layer, and few layers are all traced.
    assert planned("pp = 1", 8, 1) == [0] + [1] * 7
    assert planned("pp = 2", 4, 2) == [0] + [1] * 3
