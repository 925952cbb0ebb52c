"""The model against a second, plain implementation in float64: loss, logits and gradients, option by option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from forge.model import IGNORE, AttentionMask, FusedLoss, Transformer
from forge.model.sdpa import SdpaAttention
from tests.support.reference_model import reference_logits, reference_loss
from tests.support.small_models import batch, gradients, small_config, small_model

TIGHT = {"rtol": 1e-10, "atol": 1e-12}

LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "original_max_position": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_position": 32, "beta_fast": 4.0, "beta_slow": 1.0}
MLA = {"q_lora_rank": 10, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
LATENT = {"attention": "mla", "mla": MLA, "rope_scaling": YARN | {"mscale_all_dim": 1.0}}
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7 + [2], [5] + [6] * 11])
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0], [0, *range(11)]])

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one key head": {"n_kv_heads": 1},
    "as many key heads": {"n_kv_heads": 4},
    "heads wider than dim": {"head_dim": 10},
    "qk_norm": {"qk_norm": True},
    "attention_bias": {"attention_bias": True},
    "tied": {"tie_embeddings": True},
    "window": {"sliding_window": 3},
    "window in every other layer": {"sliding_window": 3, "sliding_window_pattern": 2},
    "a pattern of kinds": {"n_layers": 4, "layer_pattern": ["sliding", "nope", "full"], "sliding_window": 3},
    "a theta of sliding layers": {
        "layer_pattern": ["full", "sliding"],
        "sliding_window": 3,
        "sliding_rope_theta": 10.0,
        "rope_scaling": YARN,
    },
    "part of each head rotated": {"head_dim": 12, "rope_fraction": 0.5, "rope_scaling": YARN},
    "gate per head": {"attention_gate": "head"},
    "gate per element": {"attention_gate": "element"},
    "sinks": {"attention_sinks": True},
    "sinks, a window and a cap": {"attention_sinks": True, "sliding_window": 3, "attention_soft_cap": 0.5},
    "latent attention": LATENT,
    "latent attention with everything": LATENT
    | {
        "mla": LATENT["mla"] | {"q_lora_rank": 0},
        "attention_bias": True,
        "attention_gate": "head",
        "attention_sinks": True,
        "layer_pattern": ["sliding", "nope"],
        "sliding_window": 3,
        "rope_scaling": YARN | {"mscale_all_dim": 0.7, "attention_factor": 1.1},
    },
    "attention residuals": {"n_layers": 5, "residual": "attention", "residual_block_size": 2},
    "attention residuals, every layer a block": {
        "n_layers": 3,
        "residual": "attention",
        "residual_block_size": 1,
        "norm_position": "sandwich",
    },
    "attention residuals, one block": {"residual": "attention", "norm_position": "post"},
    "latent attention without positions beside Kimi Delta Attention": {
        **LATENT,
        "rope_scaling": None,
        "n_layers": 3,
        "layer_pattern": ["linear", "nope", "nope"],
        "linear_attention": {
            "kind": "kimi_delta",
            "n_key_heads": 2,
            "key_head_dim": 4,
            "full_rank_gate": True,
            "decay_bound": 5.0,
        },
        "activation": "situ",
        "activation_limit": 0.5,
        "activation_up_limit": 2.0,
        "attention_gate": "element",
    },
    "window beyond the sequence": {"sliding_window": 50},
    "logit cap": {"logit_soft_cap": 2.0},
    "attention cap": {"attention_soft_cap": 0.5},
    "linear": {"rope_scaling": {"kind": "linear", "factor": 3.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "yarn": {"rope_scaling": YARN},
    "post norms": {"norm_position": "post"},
    "sandwich": {"norm_position": "sandwich"},
    "zero-centered norms": {"zero_centered_norms": True, "qk_norm": True},
    "gelu with biases": {"activation": "gelu_tanh", "ffn_bias": True, "attention_output_bias": True},
    "squared relu": {"activation": "relu2"},
    "clamped swiglu": {"activation": "clamped_swiglu", "activation_limit": 0.5},
    "scaled embeddings": {"scale_embeddings": True, "tie_embeddings": True},
    "norms over all heads": {"qk_norm": True, "qk_norm_over": "projection"},
    "linear layers": {
        "layer_pattern": ["linear", "full"],
        "linear_attention": {"n_key_heads": 2, "key_head_dim": 6, "chunk_size": 5},
    },
    "linear layers with more value heads": {
        "layer_pattern": ["linear"],
        "linear_attention": {
            "n_key_heads": 2,
            "n_value_heads": 4,
            "key_head_dim": 3,
            "value_head_dim": 5,
            "conv_size": 3,
        },
    },
    "linear layers with a decay for each channel": {
        "layer_pattern": ["linear", "full"],
        "linear_attention": {
            "kind": "kimi_delta",
            "n_key_heads": 2,
            "n_value_heads": 4,
            "key_head_dim": 3,
            "value_head_dim": 5,
            "chunk_size": 5,
        },
    },
    "all at once": {
        "qk_norm": True,
        "attention_bias": True,
        "tie_embeddings": True,
        "sliding_window": 3,
        "sliding_window_pattern": 2,
        "logit_soft_cap": 2.0,
        "attention_soft_cap": 0.5,
        "rope_scaling": YARN,
    },
}


@pytest.mark.parametrize("sequence", ["whole", "documents"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_every_gradient_equal_the_plain_form(options: dict[str, Any], sequence: str) -> None:
    inputs = {} if sequence == "whole" else {"documents": DOCUMENTS, "positions": POSITIONS}
    config = small_config(**options)
    model = small_model(config)
    model.loss = FusedLoss(z_loss_coef=0.01, chunk_tokens=5, soft_cap=config.logit_soft_cap)
    tokens, labels = batch()
    ours = model(tokens, labels, **inputs)
    ours[0].backward()

    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    plain = reference_loss(parameters, config, tokens, labels, z_loss_coef=0.01, **inputs)
    plain[0].backward()
    assert ours.dtype == torch.float64
    assert_close(ours, plain, **TIGHT)
    assert_close(gradients(model), {name: p.grad for name, p in parameters.items()}, **TIGHT)


@pytest.mark.parametrize("options", [{}, {"logit_soft_cap": 2.0}, {"tie_embeddings": True}], ids=str)
def test_without_labels_the_model_returns_the_logits(options: dict[str, Any]) -> None:
    config = small_config(**options)
    model = small_model(config)
    tokens, _ = batch()
    assert_close(model(tokens), reference_logits(dict(model.named_parameters()), config, tokens), **TIGHT)


@pytest.mark.parametrize("tied", [False, True])
def test_parts_in_a_chain_equal_the_whole_model(tied: bool) -> None:
    config = small_config(n_layers=3, tie_embeddings=tied, sliding_window=4, sliding_window_pattern=3)
    tokens, labels = batch()
    whole = small_model(config)
    whole(tokens, labels, POSITIONS, DOCUMENTS)[0].backward()

    first = small_model(config, layers=range(0, 2), head=False)
    last = small_model(config, layers=range(2, 3), embed=False)
    losses = last(first(tokens, None, POSITIONS, DOCUMENTS), labels, POSITIONS, DOCUMENTS)
    losses[0].backward()
    assert_close(losses, whole(tokens, labels, POSITIONS, DOCUMENTS), **TIGHT)
    parts = gradients(first)
    for name, grad in gradients(last).items():
        parts[name] = parts.get(name, 0.0) + grad
    assert_close(parts, gradients(whole), **TIGHT)


def test_a_parameters_name_does_not_depend_on_the_part() -> None:
    config = small_config(n_layers=3)
    names = [name for name, _ in Transformer(config, 8).named_parameters()]
    first = [name for name, _ in Transformer(config, 8, layers=range(0, 1), head=False).named_parameters()]
    last = [name for name, _ in Transformer(config, 8, layers=range(1, 3), embed=False).named_parameters()]
    assert first + last == names
    assert names[0] == "embedding.weight"
    assert names[-2:] == ["norm.weight", "head.weight"]
    assert "layers.2.feed_forward.w3.weight" in names


def test_positions_shift_nothing_but_the_rotation() -> None:
    """RoPE is relative: an offset of all positions keeps the loss, another spacing changes it."""
    model = small_model(small_config(), seq_len=40)
    tokens, labels = batch()
    plain = model(tokens, labels)
    positions = torch.arange(12).expand(2, 12)
    assert_close(model(tokens, labels, positions + 20), plain, **TIGHT)
    assert not torch.allclose(model(tokens, labels, positions * 3), plain)


def test_a_document_is_independent_of_its_neighbours() -> None:
    model = small_model(small_config(sliding_window=3))
    tokens, _ = batch(sequences=1)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    together = model(tokens, documents=documents)
    assert_close(together[:, :5], model(tokens[:, :5]), **TIGHT)
    assert_close(together[:, 5:], model(tokens[:, 5:]), **TIGHT)


def test_bfloat16_keeps_norm_rotation_and_loss_in_float32() -> None:
    model = small_model(small_config(), dtype=torch.bfloat16)
    tokens, labels = batch()
    assert model.rope_cos.dtype == torch.float32
    assert model(tokens, labels).dtype == torch.float32
    assert model(tokens).dtype == torch.float32
    exact = small_model(small_config())(tokens, labels)
    assert_close(model(tokens, labels).double(), exact, rtol=0.02, atol=0.0)


def test_a_sequence_longer_than_seq_len_is_refused() -> None:
    model = small_model(small_config(), seq_len=8)
    with pytest.raises(ValueError, match=r"12 tokens.*8"):
        model(*batch())


def test_a_batch_without_a_valid_label_has_loss_and_gradients_zero() -> None:
    model = small_model(small_config())
    tokens, labels = batch()
    losses = model(tokens, torch.full_like(labels, IGNORE))
    losses[0].backward()
    assert losses.tolist() == [0.0, 0.0, 0.0]
    assert all((grad == 0).all() for grad in gradients(model).values())


class CountingAttention(SdpaAttention):
    """A custom attention function, set like the one of parallel code."""

    def __init__(self) -> None:
        self.prepared: list[AttentionMask] = []
        self.used: list[AttentionMask] = []

    def prepare(self, mask: AttentionMask, x: Tensor) -> AttentionMask:
        self.prepared.append(super().prepare(mask, x))
        return self.prepared[-1]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *sinks: Any) -> Tensor:
        self.used.append(mask)
        return super().__call__(q, k, v, mask, *sinks)


def test_the_set_attention_function_builds_masks_once_per_forward_and_window() -> None:
    model = small_model(small_config(n_layers=4, sliding_window=3, sliding_window_pattern=2))
    plain = model(*batch())
    attend = CountingAttention()
    for block in model.layers.values():
        block.attention.attend = attend
    assert torch.equal(model(*batch()), plain)
    sliding, full = attend.prepared
    assert (sliding.window, full.window, full.table) == (3, 0, None)
    assert all(used is made for used, made in zip(attend.used, [sliding, full, sliding, full], strict=True))
