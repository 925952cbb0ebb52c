"""Random models from all parts of [model], each with a random layout.

A seed gives one pair. If the configuration's checks refuse a draw, as they would refuse a user's configuration, the
generator draws again.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

from forge.config import Config, parse_toml_text, to_toml
from forge.config.keys import to_literal
from forge.runtime.errors import UserError
from forge.tools.verify.layouts import Case, at_random
from forge.tools.verify.shrink import changed
from tests.support.equivalence import tiny_config

MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
LINEAR = {"n_key_heads": 2, "n_value_heads": 4, "key_head_dim": 8, "value_head_dim": 6, "chunk_size": 16}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_position": 32, "mscale_all_dim": 0.7}
LLAMA3 = {"kind": "llama3", "factor": 4.0, "original_max_position": 32}
COMPILED = '[compile]\nenabled = true\nbackend = "aot_eager_decomp_partition"\n'


def draw_model(generator: random.Random) -> dict[str, Any]:
    """Draw keys of [model] and its tables. Their combination may be invalid."""

    def some(share: float = 0.5) -> bool:
        return generator.random() < share

    choose = generator.choice
    kinds = ["full", "sliding", "nope", "linear"]
    model: dict[str, Any] = {
        "norm_position": choose(["pre", "pre", "post", "sandwich"]),
        "residual": choose(["add", "add", "attention"]),
        "residual_block_size": choose([1, 2, 3]),
        "zero_centered_norms": some(0.3),
        "activation": choose(["silu", "silu", "gelu_tanh", "relu2", "clamped_swiglu", "situ"]),
        "activation_limit": 0.5,
        "ffn_bias": some(0.3),
        "attention_bias": some(0.3),
        "attention_output_bias": some(0.3),
        "scale_embeddings": some(0.3),
        "tie_embeddings": some(0.3),
        "qk_norm": some(0.4),
        "qk_norm_over": choose(["head", "projection"]),
        "attention": choose(["gqa", "gqa", "mla"]),
        "attention_gate": choose(["none", "head", "element"]),
        "attention_sinks": some(0.4),
        "attention_soft_cap": choose([0.0, 0.0, 3.0]),
        "attention_scale_dim": choose([0.0, 0.0, 20.0]),
        "logit_soft_cap": choose([0.0, 0.0, 5.0]),
        "layer_pattern": [choose(kinds) for _ in range(choose([1, 2, 3]))],
    }
    if model["attention"] == "mla":
        model["mla"] = MLA | {"q_lora_rank": choose([0, 12])}
    else:
        model["rope_fraction"] = choose([1.0, 0.5])
    if some(0.4):
        model["rope_scaling"] = choose([YARN, YARN | {"truncate": False}, LLAMA3])
    if "sliding" in model["layer_pattern"]:
        model |= {"sliding_window": 24, "sliding_rope_theta": choose([0.0, 50.0])}
    if "linear" in model["layer_pattern"]:
        model["linear_attention"] = LINEAR | {
            "kind": choose(["gated_delta", "kimi_delta"]),
            "full_rank_gate": some(),
            "decay_bound": choose([0.0, 5.0]),
        }
    if some(0.4):
        model["mtp"] = {"depth": choose([1, 2]), "loss_coef": 0.5}
    if some(0.6):
        groups = choose([1, 1, 4])
        model["moe"] = {
            "n_experts": 8,
            "top_k": choose([1, 2, 3]),
            "expert_dim": 24,
            "latent_dim": choose([0, 0, 20]),
            "n_shared_experts": choose([0, 1, 2]),
            "shared_expert_gate": some(),
            "n_expert_groups": groups,
            "n_limited_groups": max(1, groups // 2),
            "score_function": choose(["softmax", "sigmoid"]),
            "normalize_top_k": some(),
            "route_scale": choose([1.0, 1.5]),
            "balance": choose(["bias", "quantile", "aux_loss", "sequence_aux_loss", "none"]),
            "aux_loss_coef": 0.3,
            "z_loss_coef": choose([0.0, 0.1]),
            "bias_update_rate": 0.05,
            "n_dense_layers": choose([0, 0, 1]),
            "every": choose([1, 1, 2]),
            "expert_bias": some(),
            "router_bias": some(),
        }
    return model


def in_float8(text: str, generator: random.Random) -> str:
    """Convert a `tiny_config` text to a block format, with sizes of whole blocks on each of two ranks of tp or cp."""
    kind, experts = generator.choice(["mxfp8", "mxfp8", "blockwise"]), generator.choice(['"auto"', "false"])
    for old, new in {
        "\ndim = 32": "\ndim = 128",
        "ffn_dim = 48": "ffn_dim = 128",
        "seq_len = 80": "seq_len = 128",
        "[precision]": f'[precision]\nfloat8 = "{kind}"\nfloat8_experts = {experts}',
    }.items():
        assert old in text
        text = text.replace(old, new, 1)
    return text


def draw_config(generator: random.Random, more: str = "", float8: float = 0.0) -> Config:
    """Draw a model in one process. float8: the probability of a block format."""
    while True:
        keys = draw_model(generator)
        text = tiny_config(model="\n".join(f"{key} = {to_literal(value)}" for key, value in keys.items()))
        if generator.random() < float8:
            text = in_float8(text, generator)
        with contextlib.suppress(UserError):
            return parse_toml_text(text + more)


def with_rounded_rows(config: Config, seed: int) -> Config:
    """Return `config`. If it has experts, some draws add precision.float8_dispatch."""
    rounds = config.model.moe is not None and random.Random(f"rows {seed}").random() < 0.3
    return changed(config, {"precision.float8_dispatch": True}) if rounds else config


def draw(seed: int, worlds: tuple[int, ...], compiles: bool = True) -> tuple[str, Case]:
    """Draw the configuration of a model in one process, and a layout for it. worlds: allowed world sizes."""
    generator = random.Random(seed)
    while True:
        compiled = compiles and generator.random() < 0.2
        # Compiling quantised products takes minutes on a CPU. tests/equivalence/test_block_formats.py covers the combination.
        config = draw_config(generator, *((COMPILED,) if compiled else ("", 0.3)))
        config = with_rounded_rows(config, seed)
        case = next(at_random(config, worlds, generator.randrange(2**32)), None)
        if case is not None:
            return to_toml(config), case
