"""Rotary positions against the published formulas, written out in scalars."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from forge.config.model import ModelConfig
from forge.model.attention import rope_frequencies, rope_tables, rotate
from tests.support.reference_model import reference_frequencies, reference_rotation
from tests.support.small_models import small_config

LLAMA31 = {
    "kind": "llama3",
    "factor": 8.0,
    "original_max_position": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LINEAR = {"kind": "linear", "factor": 8.0}
YARN = {"kind": "yarn", "factor": 16.0, "original_max_position": 4096}


def frequencies_of(config: ModelConfig) -> Tensor:
    return rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)


@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA31, YARN, YARN | {"attention_factor": 1.3}], ids=str)
def test_frequencies_and_factor_equal_the_published_formulas(scaling: dict | None) -> None:
    config = small_config(head_dim=128, rope_theta=500000.0, rope_scaling=scaling)
    frequencies, factor = reference_frequencies(config, 128)
    assert_close(frequencies_of(config), torch.tensor(frequencies, dtype=torch.float64), rtol=1e-13, atol=0.0)
    assert rope_tables(config, 4)[0][0, 0].tolist() == pytest.approx([factor] * 64, rel=1e-14)


def test_scaling_keeps_the_fastest_and_divides_the_slowest_pair() -> None:
    plain = frequencies_of(small_config(head_dim=128, rope_theta=500000.0))
    for scaling in (LLAMA31, YARN):
        scaled = frequencies_of(small_config(head_dim=128, rope_theta=500000.0, rope_scaling=scaling))
        assert scaled[0] == plain[0]
        assert scaled[-1] == pytest.approx(plain[-1] / scaling["factor"])
        assert (scaled.diff() < 0).all()


def test_rotation_turns_pairs_half_a_head_apart() -> None:
    config = small_config(head_dim=8)
    x = torch.randn(5, 8, dtype=torch.float64)
    cos, sin = (table[0] for table in rope_tables(config, 5))
    turned = rotate(x[None, :, None], cos[:, None], sin[:, None])[0, :, 0]
    assert_close(turned, reference_rotation(x, torch.arange(5), config), rtol=1e-13, atol=1e-14)
    one = rotate(torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0]).view(1, 1, 1, 8), cos[1:2, None], sin[1:2, None])
    assert one[0, 0, 0, 0] == pytest.approx(math.cos(1.0))
    assert one[0, 0, 0, 4] == pytest.approx(math.sin(1.0))


def test_bfloat16_is_rotated_in_float32_and_rounded_once() -> None:
    config = small_config(head_dim=64)
    x = torch.randn(1, 300, 2, 64, dtype=torch.bfloat16)
    cos, sin = (table[0].float()[:, None] for table in rope_tables(config, 300))
    assert rotate(x, cos, sin).dtype == torch.bfloat16
    assert_close(
        rotate(x, cos, sin), rotate(x.double(), cos.double(), sin.double()).bfloat16(), rtol=0.008, atol=1e-6
    )
