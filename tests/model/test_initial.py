"""No part of a model is left uninitialised."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from torch import nn

from forge.model import Normal, Transformer
from forge.parallel.initialize import fill_random
from forge.shard import Box
from tests.support.small_models import Wider, batch, small_config

EVERYTHING = {"qk_norm": True, "attention_bias": True}
MOE = {"moe": {"n_experts": 4, "top_k": 2, "n_shared_experts": 1, "n_dense_layers": 1}}
UNTOUCHED = -(2**40)  # for integers, since they have no NaN
PARTS = [{}, {"layers": range(1), "head": False}, {"layers": range(1, 2), "embed": False}]


@pytest.mark.parametrize("parts", PARTS, ids=["whole", "first stage", "last stage"])
@pytest.mark.parametrize("options", [{}, EVERYTHING, EVERYTHING | {"tie_embeddings": True}, MOE], ids=str)
def test_initialisation_overwrites_all_uninitialised_memory(
    options: dict[str, Any], parts: dict[str, Any]
) -> None:
    config = small_config(**options)
    with torch.device("meta"):
        model = Transformer(config, 12, **parts)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(torch.nan if tensor.is_floating_point() else UNTOUCHED)

    for name, start in model.initial_values().items():
        parameter = model.get_parameter(name).detach()
        parameter.normal_(0.0, start.std) if isinstance(start, Normal) else parameter.fill_(start)
    model.reset_buffers(torch.float32)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.isfinite().all() and (tensor != UNTOUCHED).all(), name
    tokens, labels = batch()
    x = tokens if parts.get("embed", True) else torch.randn(2, 12, config.dim)
    assert model(x, labels).isfinite().all()


def test_start_values_follow_the_kind_of_parameter() -> None:
    config = small_config(n_layers=8, init_std=0.02, **EVERYTHING)
    values = Transformer(config, 12, layers=range(6, 8)).initial_values()
    into_stream = Normal(0.02 / sqrt(2 * 8))  # by the model's eight layers, also for a part with fewer
    assert values["embedding.weight"] == values["head.weight"] == Normal(0.02)
    assert values["layers.7.attention.wq.weight"] == values["layers.7.feed_forward.w3.weight"] == Normal(0.02)
    assert values["layers.6.attention.wo.weight"] == values["layers.7.feed_forward.w2.weight"] == into_stream
    assert values["layers.6.attention.wk.bias"] == 0.0
    norms = {name for name, start in values.items() if start == 1.0}
    assert norms == {name for name in values if name.endswith("norm.weight")}


def test_experts_start_like_dense_projections_and_differ_from_each_other() -> None:
    config = small_config(n_layers=8, init_std=0.02, **MOE)
    values = Transformer(config, 12, layers=range(6, 8)).initial_values()
    into_stream = Normal(0.02 / sqrt(2 * 8))
    experts = "layers.7.feed_forward.experts"
    assert values[f"{experts}.w13"] == values["layers.7.feed_forward.router.weight"] == Normal(0.02)
    assert values[f"{experts}.w2"] == values["layers.7.feed_forward.shared.w2.weight"] == into_stream
    weight = torch.empty(4, 6, 8)
    fill_random(weight, Box((0, 0, 0), (4, 6, 8)), weight.shape, Normal(1.0), 0, f"{experts}.w13")
    assert len({tuple(expert.flatten().tolist()) for expert in weight}) == 4


def test_a_parameter_of_an_unknown_module_is_an_error() -> None:
    model = Transformer(small_config(), 12)
    model.layers["1"].feed_forward = nn.Conv1d(2, 2, 1)
    with pytest.raises(TypeError, match=r"layers\.1\.feed_forward\.weight has no .*the class Conv1d"):
        model.initial_values()


def test_a_custom_module_defines_its_initial_values() -> None:
    values = Wider(small_config(), 12).initial_values()
    assert values["layers.1.mixer.scan.weight"] == 0.5 and values["positions.weight"] == Normal(0.02)


def test_float64_tables_are_computed_in_float64() -> None:
    model = Transformer(small_config(), 5000).double()
    model.reset_buffers(torch.float64)
    assert model.rope_cos.dtype == torch.float64
    assert model.rope_cos[0, 4999, 0] == torch.tensor(4999.0, dtype=torch.float64).cos()


def test_the_tables_are_in_no_state_dict() -> None:
    assert not [name for name in Transformer(small_config(), 12).state_dict() if "rope" in name]
