"""A small configuration keeps the structure of the large one."""

from fractions import Fraction
from math import prod

import pytest

from forge.config import Config, Degrees, check_world, load_config, parse_toml_text
from forge.config.float8 import BLOCKS
from forge.config.load import CONFIGS
from forge.config.model import ModelConfig
from forge.config.section import Positive, Section
from forge.tools.verify.layouts import AXES, Case, why_illegal
from forge.tools.verify.shrink import changed, for_layout, other_parts, rounded_config, shrink
from tests.support.configs import TINY, tiny

SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.toml"))


def ratios(config: Config) -> tuple:
    model = config.model
    moe = model.moe and (model.moe.n_shared_experts > 0, model.moe.n_dense_layers > 0, model.moe.balance)
    return model.n_heads // model.n_kv_heads, model.tie_embeddings, model.qk_norm, model.kind, moe


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_becomes_small_and_keeps_its_structure(name: str) -> None:
    config = load_config(["--config", name])
    small, _ = shrink(config)
    check_world(small, 1)
    assert small.model.dim <= 128 and small.model.n_layers <= 4 and small.model.vocab_size < 72
    assert ratios(small) == ratios(config)
    assert {getattr(small.precision, key) for key in ("storage", "compute", "reduce")} == {"float64"}
    assert small.precision.fp32_modules == config.precision.fp32_modules
    assert small.optimizer.lr == config.optimizer.lr


def test_base_sizes_shrink_with_the_model() -> None:
    config = load_config(["--config=ladder", "--ladder.depth=24", "--optimizer.mup.base_head_dim=32"])
    small, notes = shrink(config)
    mup, model = small.optimizer.mup, small.model
    assert model.dim / mup.base_dim == config.model.dim / config.optimizer.mup.base_dim == 8
    assert mup.base_depth == max(1, round(model.n_layers / 8)) and model.head_dim == 2 * mup.base_head_dim
    assert not any("mup" in note for note in notes)


def test_indivisible_sizes_stay_indivisible() -> None:
    small, _ = shrink(changed(tiny(), {"model.vocab_size": 50257, "model.ffn_dim": 101}))
    assert small.model.vocab_size % 2 and small.model.ffn_dim % 2


def test_groups_of_experts_keep_their_limit() -> None:
    text = TINY + "[model.moe]\nn_experts = 256\nn_expert_groups = 8\nn_limited_groups = 4\ntop_k = 8\n"
    moe = shrink(parse_toml_text(text))[0].model.moe
    assert moe is not None and moe.n_experts <= 16 and moe.n_expert_groups > 1
    assert 1 <= moe.n_limited_groups < moe.n_expert_groups and moe.top_k >= 2


def test_layers_of_two_kinds_of_windows_both_stay() -> None:
    text = TINY.replace("n_layers = 2", "n_layers = 30\nsliding_window = 16\nsliding_window_pattern = 6")
    model = shrink(parse_toml_text(text))[0].model
    assert 1 < model.sliding_window_pattern <= model.n_layers


class Latent(Section):
    kv_lora_rank: Positive = 512
    rope_head_dim: Positive = 4
    conv_size: Positive = 3
    depth: Positive = 100
    on: bool = True


class WithPart(ModelConfig):
    narrow: Latent = Latent()


def test_the_widths_of_unknown_parts_shrink_too() -> None:
    model = WithPart(dim=1024, n_layers=2, n_heads=8, ffn_dim=2048, vocab_size=100)
    assert other_parts(model, Fraction(1, 32)) == {
        "model.narrow.kv_lora_rank": 16,
        "model.narrow.rope_head_dim": 4,
        "model.narrow.conv_size": 3,
    }


def test_what_cannot_be_kept_is_reported() -> None:
    moe = "[model.moe]\nn_experts = 8\ncapacity_factor = 1.25\nrouter_noise = 0.1\n"
    text = TINY + moe + "[compile]\nenabled = true\n[precision]\nfloat8 = 'rowwise'\n"
    _, notes = shrink(parse_toml_text(text))
    assert sorted(note.split(",")[0] for note in notes) == [
        "compile.enabled is false",
        "model.moe.capacity_factor is 0.0",
        "model.moe.router_noise is 0.0",
        'precision.float8 is "none"',
    ]
    assert shrink(tiny())[1] == []


def test_patterns_with_a_layer_s_number_match_a_layer_of_the_small_model() -> None:
    """The first layer has no experts, and every third layer has full attention."""
    text = TINY.replace("n_layers = 2", "n_layers = 32\nsliding_window = 16\nsliding_window_pattern = 3")
    text += "[model.moe]\nn_experts = 8\nn_dense_layers = 1\n"
    patterns = ["layers.31", "layers.0.*", "layers.1?.*", "layers.3*", "layers.*.norm", "mtp.layers.9"]
    text += f"[precision]\nfp32_modules = {patterns}\n"
    text += "[[optimizer.groups]]\nnames = ['layers.30.feed_forward.*']\nlr_scale = 0.5\n"
    small, notes = shrink(parse_toml_text(text))
    several = ["layers.1.*", "layers.2.*", "layers.3.*", "layers.1*", "layers.3*"]
    expected = ["layers.3", "layers.0.*", *several, "layers.*.norm", "mtp.layers.9"]
    assert list(small.precision.fp32_modules) == expected
    assert small.optimizer.groups[0].names == ("layers.3.feed_forward.*",)
    assert sorted(note.split(" ")[0] for note in notes) == ["optimizer.groups", "precision.fp32_modules"]


def test_qk_clip_still_clips() -> None:
    text = TINY + "[optimizer]\nname = 'muon'\n[optimizer.muon]\nqk_clip = 100\n"
    small, notes = shrink(parse_toml_text(text))
    assert small.optimizer.muon.qk_clip == 0.03
    assert notes == ["optimizer.muon.qk_clip is 0.03, not 100.0: the small model has smaller logits"]


@pytest.mark.parametrize("recipe", BLOCKS)
@pytest.mark.parametrize("name", ["debug", "moe_debug", "mla_debug", "hybrid_debug"])
def test_block_formats_stay_and_two_ranks_have_whole_blocks(name: str, recipe: str) -> None:
    config = load_config(["--config", name, f"--precision.float8={recipe}"])
    small, notes = shrink(config)
    assert small.precision.float8 == recipe and not any("float8" in note for note in notes)
    # Latent attention: every cp rank would expand all latents, and the checks refuse that.
    cp = 1 if small.model.latent else 2
    for degrees in ({"tp": 2}, {"cp": cp}, {"tp": 2, "cp": cp}, {"tp": 2, "pp": 2}):
        Case.of(degrees).config(small)
    assert cp == 2 or "wkv_b" in (why_illegal(small, Case.of({"cp": 2})) or "")
    assert "parallel.tp" in (why_illegal(small, Case.of({"tp": 4})) or "parallel.tp")
    for_layout(
        small, Degrees(world=4 * cp, pp=1, dp_replicate=1, dp_shard=1, cp=cp, tp=4, ep=1, accumulation=1)
    )
    rounded = rounded_config(config, small)
    assert (rounded.precision.float8, rounded.precision.compute) == ("none", config.precision.compute)
    assert (rounded.model, rounded.train) == (small.model, small.train)


def test_features_that_need_a_package_or_a_kernel_are_turned_off() -> None:
    options = ["--metrics.wandb=project", "--evaluate.tasks=['arc_easy']", "--precision.float8=mxfp8"]
    options += ["--precision.float8_all_gather=true", "--precision.float8_emulate=false"]
    small, notes = shrink(load_config(["--config=debug", *options]))
    assert (small.metrics.wandb, small.evaluate.tasks) == ("", ())
    assert (small.precision.float8_all_gather, small.precision.float8_emulate) == ("auto", "auto")
    assert [note.split(" is ")[0] for note in notes] == [
        "precision.float8_emulate",
        "precision.float8_all_gather",
    ]


@pytest.mark.parametrize("name", SHIPPED)
def test_each_key_changed_by_shrinking_is_a_size_or_a_note(name: str) -> None:
    config = load_config(["--config", name])
    small, notes = shrink(config)
    for section in (
        "optimizer",
        "schedule",
        "pipeline",
        "activation_checkpoint",
        "compile",
        "resilience",
        "metrics",
    ):
        before, after = (getattr(one, section).model_dump() for one in (config, small))
        for key, value in before.items():
            noted = any(note.startswith((f"{section}.{key} ", f"{section}.{key}.")) for note in notes)
            if (section, key) == ("optimizer", "mup"):  # sizes
                assert not noted
                continue
            assert (value != after[key]) == noted, f"{section}.{key}"


@pytest.mark.parametrize("moments", ["int8", "bfloat16"])
def test_moments_keep_their_storage(moments: str) -> None:
    config = changed(tiny(), {"optimizer.moment_dtype": moments})
    small, notes = shrink(config)
    assert small.optimizer.moment_dtype == moments and not notes


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({"tp": 8, "cp": 4}, {"parallel.context": "ulysses"}),
        ({"pp": 8, "dp_shard": 4}, {"pipeline.schedule": "Interleaved1F1B"}),
        ({"pp": 4, "dp_replicate": 3}, {"pipeline.schedule": "DualPipeV"}),
        ({"dp_shard": 6, "tp": 2, "ep": 12}, {"model.moe.n_experts": 8}),
    ],
)
def test_sizes_grow_until_a_large_layout_divides_them(degrees: dict[str, int], options: dict) -> None:
    small = changed(shrink(tiny())[0], options)
    whole = Degrees(**{axis: 1 for axis in AXES} | degrees, world=prod_of(degrees), accumulation=1)
    result = for_layout(small, whole)
    assert check_world(result, whole.world).ep == whole.ep
    assert result.model.n_heads % whole.tp == 0 and result.model.n_layers >= whole.pp


def prod_of(degrees: dict[str, int]) -> int:
    return prod(degree for axis, degree in degrees.items() if axis != "ep")
