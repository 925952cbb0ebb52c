"""Counting, initialisation, weight decay, rounding and planning know every part of a model.

Random models from all parts; expectations come from names, shapes and keys alone.
"""

from __future__ import annotations

import random
from fnmatch import fnmatchcase
from math import sqrt

import pytest
from torch import nn

from forge.config import Config, to_toml
from forge.config.layout import Precision
from forge.config.model import ModelConfig
from forge.model import Normal, flops_per_token, parameter_counts
from forge.model.initial import Uniform
from forge.parallel.float8.apply import check_patterns, choose_layers
from tests.support.planning import facts_of, float32, measured, planned
from tests.support.random_models import draw_config
from tests.support.small_models import on_meta

SEQ = 80
SEEDS = range(24)


def drawn(seed: int) -> Config:
    return draw_config(random.Random(seed))


def mean_keys(window: int) -> float:
    return sum(min(i + 1, window or SEQ) for i in range(SEQ)) / SEQ


def products_with_keys(model: ModelConfig, layer: int) -> float:
    """Multiplications of a token with keys and values, or with the states of a linear layer."""
    kind, linear, mla = model.kind_of(layer), model.linear_attention, model.latent
    if kind == "linear":
        assert linear is not None
        return 3 * linear.n_value_heads * linear.key_head_dim * linear.value_head_dim
    sizes = 2 * model.head_dim
    if mla is not None:
        sizes = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
    return model.n_heads * sizes * mean_keys(model.sliding_window if kind == "sliding" else 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_operations_match_a_tokens_active_matrices(seed: int) -> None:
    model = drawn(seed).model
    modules = 0 if model.mtp is None else model.mtp.depth
    idle, products = 0, 0.0
    for name, parameter in on_meta(model, SEQ).named_parameters():
        used = parameter.numel()
        if ".experts." in name:
            assert model.moe is not None
            used = used // model.moe.n_experts * model.moe.top_k
        idle += parameter.numel() - used
        if parameter.ndim > 1 and name != "embedding.weight" and name != "head.weight":
            products += 0 if name.endswith("bias") else used
    products += (1 + modules) * model.vocab_size * model.dim
    products += sum(products_with_keys(model, layer) for layer in range(model.n_layers + modules))
    built = on_meta(model, SEQ)
    assert flops_per_token(built, SEQ) == pytest.approx(6 * products, rel=1e-12)
    counts = parameter_counts(built)
    assert counts.total - counts.active == idle


@pytest.mark.parametrize("seed", SEEDS)
def test_vectors_are_left_out_of_weight_decay_and_matrices_are_not(seed: int) -> None:
    config = drawn(seed)
    for name, parameter in on_meta(config.model, SEQ).named_parameters():
        excluded = any(fnmatchcase(name, pattern) for pattern in config.optimizer.no_decay)
        vector = parameter.ndim < 2 or name.endswith("bias") or ".conv." in name or name == "embedding.weight"
        assert excluded == vector, name


@pytest.mark.parametrize("seed", SEEDS)
def test_parameters_start_as_their_kind_does(seed: int) -> None:
    model = drawn(seed).model
    stream = Normal(model.init_std / sqrt(2 * model.n_layers))
    for name, start in on_meta(model, SEQ).initial_values().items():
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if ".decay.dt_bias" in name and model.linear_attention.decay_bound:
            assert start == 0.0, name
        elif ".conv." in name or ".decay." in name:
            assert isinstance(start, Uniform) or start == 1.0, name
        elif name.endswith(("bias", "mix.query")):
            assert start == 0.0, name
        elif leaf.endswith("norm"):
            assert start == (0.0 if model.zero_centered_norms and leaf != "out_norm" else 1.0), name
        elif leaf in ("wo", "w2", "from_latent"):
            assert start == stream, name
        else:
            assert start == Normal(model.init_std), name


@pytest.mark.parametrize("seed", SEEDS)
def test_float8_takes_the_projections_of_blocks_and_no_small_ones(seed: int) -> None:
    model = drawn(seed).model
    wide = model.model_copy(update={"dim": 64, "ffn_dim": 96})
    built, precision = on_meta(wide, SEQ), Precision()
    check_patterns(built, precision.float8_exclude)
    chosen, left_out = choose_layers(built, precision)
    linear = {name for name, module in built.named_modules() if isinstance(module, nn.Linear)}
    assert chosen.keys() | left_out.keys() == linear
    for name, module in chosen.items():
        assert ".attention." in name or ".feed_forward." in name
        assert name.rpartition(".")[2] not in ("router", "wa", "wb", "shared_gate")
        assert not any(side % 16 for side in module.weight.shape)
    assert {name for name in linear if ".feed_forward.w" in name} <= chosen.keys()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 15))
def test_a_plan_predicts_a_runs_memory_and_traffic(seed: int) -> None:
    text = float32(to_toml(drawn(seed))).replace("document_mask = true", "document_mask = false")
    (stage,), run = planned(text, 2), measured(text, 2)[0]
    assert facts_of(stage) == run
