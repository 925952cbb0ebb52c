"""A linear-attention layer with per-channel decays equals transformers' Kimi Linear."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from forge.config.model import ModelConfig
from forge.model import AttentionMask, LinearAttention
from forge.model.attention import Shared
from forge.model.linear_attention import LINEAR

DIM, HEADS, SIZE, SEQ = 24, 2, 8, 70
# transformers computes norm, gates and decays in float32 for any dtype. Against float64 its error was 2.4e-5 on one CPU
# and below 1e-5 on others; forge's was 1e-6.
TOLERANCE, OWN_TOLERANCE = 5e-5, 5e-6


def theirs() -> nn.Module:
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    config = KimiLinearConfig(
        hidden_size=DIM,
        num_hidden_layers=1,
        linear_num_heads=HEADS,
        linear_head_dim=SIZE,
        layer_types=["linear_attention"],
        mlp_layer_types=["dense"],
    )
    layer = KimiLinearDeltaAttention(config, 0)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)
    return layer


def ours(layer: nn.Module) -> LinearAttention:
    config = ModelConfig.model_validate(
        {
            "dim": DIM,
            "n_layers": 1,
            "n_heads": 1,
            "ffn_dim": 1,
            "vocab_size": 1,
            "layer_pattern": ["linear"],
            "linear_attention": {
                "kind": "kimi_delta",
                "n_key_heads": HEADS,
                "key_head_dim": SIZE,
                "chunk_size": 16,
            },
        }
    )
    own, tensors = LinearAttention(config), dict(layer.named_parameters())
    names = {
        "wq": "q_proj",
        "wk": "k_proj",
        "wv": "v_proj",
        "wa_down": "forget_gate.f_a_proj",
        "wa": "forget_gate.f_b_proj",
        "wb": "b_proj",
        "wg_down": "g_a_proj",
        "wg": "g_b_proj",
        "out_norm": "o_norm",
        "wo": "o_proj",
    }
    values = {f"{name}.weight": tensors[f"{of_theirs}.weight"] for name, of_theirs in names.items()}
    values |= {
        f"decay.{name}": tensors[f"forget_gate.{of}"].flatten()
        for name, of in (("a_log", "A_log"), ("dt_bias", "dt_bias"))
    }
    channels = tensors["conv1d.weight"].squeeze(1).chunk(3)
    values |= {f"conv.{name}": part for name, part in zip("qkv", channels, strict=True)}
    own.load_state_dict(values)
    return own


@pytest.mark.long
def test_outputs_and_gradients_equal_transformers() -> None:
    plain = theirs()
    own, exact, mask = ours(plain), ours(plain).double(), AttentionMask(LINEAR, None)
    x = torch.randn(2, SEQ, DIM, generator=torch.Generator().manual_seed(1))
    shared = Shared(torch.empty(0), torch.empty(0), {LINEAR: mask})

    def results(compute: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        given = x.clone().requires_grad_()
        out = compute(given)
        return out, torch.autograd.grad(out.square().sum(), given)[0]

    of_float64 = results(lambda x: exact(x, shared), x.double())
    for compute, tolerance in ((plain, TOLERANCE), (lambda x: own(x, shared), OWN_TOLERANCE)):
        for found, expected in zip(results(compute, x), of_float64, strict=True):
            assert expected.abs().max() > 0.01
            assert (found - expected).abs().max() <= tolerance * expected.abs().max()
