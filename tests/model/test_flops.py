"""Parameter and FLOP counts against hand calculations."""

from __future__ import annotations

import pytest

from forge.config.model import ModelConfig
from forge.model import flops_per_token, parameter_counts
from tests.support.small_models import Wider, on_meta, small_config

LLAMA3_8B = ModelConfig(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, ffn_dim=14336, vocab_size=128256
)


def counts_of(config: ModelConfig):
    return parameter_counts(on_meta(config))


def flops_of(config: ModelConfig, seq_len: int) -> float:
    return flops_per_token(on_meta(config, seq_len), seq_len)


def test_llama_3_8b_has_8030261248_parameters() -> None:
    counts = counts_of(LLAMA3_8B)
    assert counts.total == counts.active == 8_030_261_248


def test_biases_and_qk_norm_are_parameters_but_no_matrix_products() -> None:
    plain, changed = small_config(), small_config(attention_bias=True, qk_norm=True)
    assert counts_of(changed).total - counts_of(plain).total == 2 * (24 + 12 + 12) + 2 * 2 * 6
    assert flops_of(changed, 64) == flops_of(plain, 64)


def test_latent_attention_counts_projections_and_distinct_key_and_value_sizes() -> None:
    mla = {
        "q_lora_rank": 10,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    }
    config = small_config(attention="mla", mla=mla, attention_sinks=True, attention_gate="head")
    down, up = 24 * 10 + 24 * (8 + 4), 10 * 4 * 10 + 8 * 4 * (6 + 5)
    attention = down + up + 4 * 5 * 24 + 24 * 4  # with the output projection and the gate
    matrices = 2 * (attention + 3 * 24 * 20) + 23 * 24
    assert flops_of(config, 64) == 6 * matrices + 2 * 6 * 4 * (10 + 5) * 65 / 2
    norms = 5 * 24 + 2 * (10 + 8)
    assert counts_of(config).total == matrices + 23 * 24 + norms + 2 * 4


def test_a_tied_head_has_flops_but_its_parameters_count_once() -> None:
    untied, tied = small_config(), small_config(tie_embeddings=True)
    assert counts_of(untied).total - counts_of(tied).total == 23 * 24
    assert flops_of(untied, 64) == flops_of(tied, 64)


def test_flops_of_llama_3_8b_at_8192_tokens() -> None:
    matrices = 6 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)
    assert flops_of(LLAMA3_8B, 8192) == matrices + 32 * 12 * 4096 * 8193 / 2


# Mixtral 8x7B and Qwen3-30B-A3B by their published shapes; DeepSeek-V3's layer with its dense ones and its shared expert.
MIXTRAL = ModelConfig.model_validate(
    {
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 8,
        "head_dim": 128,
        "ffn_dim": 14336,
        "vocab_size": 32000,
    }
    | {"moe": {"n_experts": 8, "top_k": 2}}
)
QWEN3_30B_A3B = ModelConfig.model_validate(
    {
        "dim": 2048,
        "n_layers": 48,
        "n_heads": 32,
        "n_kv_heads": 4,
        "head_dim": 128,
        "ffn_dim": 6144,
        "qk_norm": True,
    }
    | {"vocab_size": 151936, "moe": {"n_experts": 128, "top_k": 8, "expert_dim": 768}}
)


def test_mixtral_8x7b_has_46_7_billion_parameters_with_12_9_active() -> None:
    counts = counts_of(MIXTRAL)
    assert counts.total == 46_702_792_704
    assert counts.active == counts.total - 6 * 32 * 3 * 4096 * 14336 == 12_879_925_248


def test_qwen3_30b_a3b_has_30_5_billion_parameters_with_3_3_active() -> None:
    counts = counts_of(QWEN3_30B_A3B)
    assert counts.total == 30_532_122_624
    assert counts.active == counts.total - 120 * 48 * 3 * 2048 * 768
    norms, embedding = 48 * (2 * 2048 + 2 * 128) + 2048, 151936 * 2048
    assert flops_of(QWEN3_30B_A3B, 1) == 6 * (counts.active - embedding - norms) + 48 * 12 * 4096


def test_experts_cost_only_a_tokens_active_parameters() -> None:
    """A token uses the router, the chosen experts and the shared experts. Leading layers stay dense."""
    moe = {"n_experts": 6, "top_k": 2, "expert_dim": 7, "n_shared_experts": 3, "n_dense_layers": 1}
    config, dense = small_config(n_layers=3, moe=moe), small_config(n_layers=3)
    of_experts = 2 * (6 * 24 + (6 + 3) * 3 * 24 * 7 - 3 * 24 * 20)
    assert counts_of(config).total - counts_of(dense).total == of_experts
    assert counts_of(config).total - counts_of(config).active == 2 * 4 * 3 * 24 * 7
    assert flops_of(config, 64) - flops_of(dense, 64) == 6 * (of_experts - 2 * 4 * 3 * 24 * 7)


@pytest.mark.parametrize("window", [1, 3, 10, 99])
def test_attention_counts_exactly_the_visible_pairs(window: int) -> None:
    seq = 10
    pairs = sum(1 for i in range(seq) for j in range(i + 1) if i - j < window)
    config = small_config(
        sliding_window=window, sliding_window_pattern=2
    )  # the second layer has full attention
    matrices = flops_of(small_config(), 1) - 2 * 12 * 24
    attention = flops_of(config, seq) - matrices
    assert attention * seq == pytest.approx(12 * 24 * (pairs + seq * (seq + 1) / 2))


def test_a_custom_model_is_counted_as_built() -> None:
    """The position table is a lookup and the idle matrix is unused: both have no FLOPs. `Scan` reports its own FLOPs."""
    config = small_config()
    own = Wider(config, 16)
    assert parameter_counts(own).total == counts_of(config).total + 16 * 24 + 5 * 24 * 24
    assert parameter_counts(own).active == parameter_counts(own).total - 24 * 24
    assert flops_per_token(own, 16) == flops_of(config, 16) + 6 * 3 * 24 * 24 + 1000 * 16
