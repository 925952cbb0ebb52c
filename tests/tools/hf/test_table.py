"""The table of architectures against transformers' own classes, and the presets against the published models."""

from __future__ import annotations

from typing import Any

import pytest

from forge.config import load_config
from forge.config.model import ModelConfig
from forge.model import parameter_counts
from forge.tools.hf.architectures import KEYS, MUST_BE, Architecture
from forge.tools.hf.model_config import choose_architecture, read_model, write_model
from forge.tools.hf.table import ARCHITECTURES, BY_NAME
from forge.tools.hf.tensors import weights_of
from tests.support.hf_models import CASES
from tests.support.small_models import on_meta

# Derived keys: computed from others once the defaults are known. The pattern is read from old files only, as an argument.
FOLLOWS = {"layer_types", "head_dim", "sliding_window_pattern"}
# transformers has no class of Kimi K3: tests/tools/hf/test_kimi.py.
IN_TRANSFORMERS = [architecture for architecture in ARCHITECTURES if not architecture.prefix]


@pytest.mark.parametrize("architecture", IN_TRANSFORMERS, ids=lambda architecture: architecture.model_type)
def test_an_absent_key_has_the_default_of_transformers(architecture: Architecture) -> None:
    import transformers

    theirs = transformers.models.auto.configuration_auto.CONFIG_MAPPING[architecture.model_type]
    keys = {
        *KEYS.values(),
        *architecture.keys.values(),
        *architecture.window_keys,
        *architecture.defaults,
        *architecture.extra,
    }
    compared = 0
    for key in keys - FOLLOWS - {"partial_rotary_factor"}:
        try:
            ours = architecture.default(key)
        except KeyError:
            continue
        name = {"rope_theta": "default_theta", "rope_local_base_freq": "default_theta"}.get(key, key)
        assert hasattr(theirs, name), f"{architecture.name} has no {key}"
        value = getattr(theirs, name)
        if isinstance(value, dict):
            value = value["local" if key == "rope_local_base_freq" else "global"]
        assert value == ours, f"{architecture.name}: {key}"
        compared += 1
    assert compared >= 4
    for key, needed in MUST_BE.items():
        if key not in architecture.keys.values() and hasattr(theirs, key):
            assert getattr(theirs, key) == needed, f"{key} would have to be written"
    assert transformers.AutoModelForCausalLM._model_mapping[theirs].__name__ == architecture.name


def test_every_architecture_is_among_the_cases() -> None:
    assert {name for name, _ in CASES.values()} == {architecture.name for architecture in IN_TRANSFORMERS}


# config.json of the published models, and their parameter counts.
LLAMA: dict[str, Any] = {"vocab_size": 128256, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
QWEN: dict[str, Any] = {"vocab_size": 151936, "rope_theta": 1000000, "rms_norm_eps": 1e-6, "head_dim": 128}
GPT_OSS: dict[str, Any] = {
    "vocab_size": 201088,
    "rope_theta": 150000,
    "rms_norm_eps": 1e-5,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def gpt_oss_layers(layers: int, experts: int) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return {"num_hidden_layers": layers, "num_local_experts": experts, "layer_types": kinds}


PUBLISHED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama3-8b": (
        "LlamaForCausalLM",
        8_030_261_248,
        LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "llama3-70b": (
        "LlamaForCausalLM",
        70_553_706_496,
        LLAMA
        | {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
    "qwen3-8b": (
        "Qwen3ForCausalLM",
        8_190_735_360,
        QWEN
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "use_sliding_window": False,
        },
    ),
    "olmo3-7b": (
        "Olmo3ForCausalLM",
        7_298_011_136,
        {
            "vocab_size": 100278,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-6,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
            "max_position_embeddings": 65536,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "gemma3-4b": (
        "Gemma3ForCausalLM",
        3_880_263_168,
        {
            "vocab_size": 262208,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rms_norm_eps": 1e-6,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen3MoeForCausalLM",
        30_532_122_624,
        QWEN
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
        },
    ),
    "qwen3-next-80b-a3b": (
        "Qwen3NextForCausalLM",
        79_674_391_296,
        QWEN
        # The other numbers are transformers' defaults, compared by the first test.
        | dict(BY_NAME["Qwen3NextForCausalLM"].defaults)
        | {
            "rope_theta": 10000000,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
        },
    ),
    "gpt-oss-20b": ("GptOssForCausalLM", 20_914_757_184, GPT_OSS | gpt_oss_layers(24, 32)),
    "gpt-oss-120b": ("GptOssForCausalLM", 116_829_156_672, GPT_OSS | gpt_oss_layers(36, 128)),
    "mixtral-8x7b": (
        "MixtralForCausalLM",
        46_702_792_704,
        {
            "vocab_size": 32000,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-5,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
        },
    ),
    # 671,026,419,200 with the bias on the choice of experts, which is a buffer.
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        671_026_404_352,
        {
            "vocab_size": 129280,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "routed_scaling_factor": 2.5,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "initializer_range": 0.006,  # as trained; config.json has transformers' default
        },
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_model(name: str) -> None:
    import torch
    import transformers

    expected, parameters, published = PUBLISHED[name]
    model = load_config(["--config", name]).model
    assert parameter_counts(on_meta(model)).total == parameters
    architecture = choose_architecture(model)
    assert architecture.name == expected
    written = write_model(model, architecture, 8192)
    assert {key: written[key] for key in published} == published
    for key, usual in (("tie_word_embeddings", False), ("rope_scaling", None)):
        assert key in published or written[key] is usual
    described = {"architectures": [expected], "max_position_embeddings": 8192} | published
    assert ModelConfig.model_validate(read_model(described, architecture)) == model
    weights = weights_of(model, architecture)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**written))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == parameters
    plain = {f"{n}.weight" for n, m in theirs.named_modules() if isinstance(m, torch.nn.Linear)}
    plain -= {"lm_head.weight"} if model.tie_embeddings else set()
    assert plain <= {their_name for weight in weights for their_name in weight.theirs}


def test_kimi_k3_has_the_published_shape_and_number_of_parameters() -> None:
    """config.json of moonshotai/Kimi-K3 at f831ab66; published: 2.8 trillion parameters, 104 billion active."""
    model = load_config(["--config", "kimi-k3"]).model
    linear = [layer + 1 for layer in range(model.n_layers) if model.kind_of(layer) == "linear"]
    assert len(linear) == 69 and {93, *range(4, 93, 4)}.isdisjoint(linear)
    built = on_meta(model)
    counts = parameter_counts(built)
    routed = sum(p.numel() for name, p in built.named_parameters() if ".experts." in name)
    assert routed == 92 * 896 * 33_030_144
    assert round(counts.total / 1e12, 1) == 2.8
    embedding = model.vocab_size * model.dim
    assert round((counts.active - embedding) / 1e9) == 104


@pytest.mark.parametrize(
    ("name", "given", "pattern"),
    [
        ("Gemma3ForCausalLM", {}, ["sliding"] * 5 + ["full"]),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 3}, ["sliding", "sliding", "full"]),
        ("Gemma2ForCausalLM", {}, ["sliding", "full"]),
    ],
)
def test_without_layer_types_the_class_or_its_pattern_names_the_layers(
    name: str, given: dict[str, Any], pattern: list[str]
) -> None:
    described = {key: value for key, value in PUBLISHED["gemma3-4b"][2].items() if key != "layer_types"}
    described |= {"architectures": [name], "num_hidden_layers": 12, "rope_scaling": None, **given}
    model = read_model(described, BY_NAME[name])
    assert model["layer_pattern"] == pattern
