"""MFU is relative to the peak of the matrix products' format. With an unknown peak, MFU is absent."""

import pytest
import torch

from forge.config import Config
from forge.observe.metrics import mfu_of_rate
from forge.parallel.float8 import product_format
from tests.support.configs import tiny


def rate(config: Config) -> float | None:
    """Return the MFU at one token per second of a model with 1e12 FLOPs per token."""
    products = product_format(config.precision, "cuda")
    return mfu_of_rate(config, torch.device("cuda", 0), products, world_size=2, flops_per_token=1e12)


def with_float8(**keys) -> Config:
    config = tiny()
    chosen = {"compute": "bfloat16", "float8": "rowwise"} | keys
    return config.model_copy(update={"precision": config.precision.model_copy(update=chosen)})


@pytest.mark.parametrize(
    ("card", "capability", "keys", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), {"float8": "none"}, 989.5),
        ("NVIDIA H100 80GB HBM3", (9, 0), {}, 1979),
        ("NVIDIA H100 80GB HBM3", (9, 0), {"float8": "blockwise"}, 1979),
        # Emulated products cannot reach the float8 peak.
        ("NVIDIA H100 80GB HBM3", (9, 0), {"float8": "mxfp8"}, 989.5),
        ("NVIDIA H100 80GB HBM3", (9, 0), {"float8_emulate": True}, 989.5),
        ("NVIDIA A100-SXM4-80GB", (8, 0), {}, 312),
        ("Unheard of", (9, 0), {}, None),
    ],
)
def test_the_peak_is_that_of_the_products_format(monkeypatch, card: str, capability, keys, tflops) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    expected = None if tflops is None else pytest.approx(1 / (2 * tflops))
    assert rate(with_float8(**keys)) == expected


def test_a_cpu_emulates() -> None:
    assert product_format(with_float8().precision, "cpu") == "bfloat16"
