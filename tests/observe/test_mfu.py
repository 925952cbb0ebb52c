"""MFU is relative to the peak of the format that the products are made in, or not reported."""

import pytest
import torch

from forge.config import Config
from forge.observe.metrics import mfu_of_rate
from tests.support.configs import tiny


def rate(config: Config) -> float | None:
    """MFU at one token per second of a model with 1e12 FLOPs a token."""
    return mfu_of_rate(config, torch.device("cuda", 0), world_size=2, flops_per_token=1e12)


def with_float8(config: Config) -> Config:
    return config.model_copy(update={"precision": config.precision.model_copy(update={"float8": "rowwise"})})


@pytest.mark.parametrize(
    ("card", "bfloat16", "float8"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5, 1979),
        ("NVIDIA A100-SXM4-80GB", 312, None),
        ("Unheard of", None, None),
    ],
)
def test_float8_is_not_reported_as_bfloat16(monkeypatch, card: str, bfloat16, float8) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    for config, tflops in ((tiny(), bfloat16), (with_float8(tiny()), float8)):
        expected = None if tflops is None else pytest.approx(1 / (2 * tflops))
        assert rate(config) == expected
