"""Factors of initial values and learning rates match the tables of mup and completep, on any layout."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from forge.config import Config, load_config
from forge.model import Normal
from forge.optim import build_optimizer
from forge.parallel.build import build_meta_model
from forge.parallel.parametrization import factors, parametrize
from forge.runtime.errors import UserError
from forge.shard import Rates, Shard
from tests.support.equivalence import STEPS, TOLERANCE, tiny_config
from tests.support.harness import run_ranks
from tests.support.resharding import train_part

GO = torch.tensor(0.0)
# The table's row for m = 4, d = 2 and completep: scale of the initial values, learning rate, eps. A multiplier is in the
# first two, and its inverse in eps.
DENSE = {
    "embedding.weight": (1, 1, 1 / 4),
    "layers.1.attention_norm.weight": (1, 1, 1 / 8),
    "layers.1.attention.wq.weight": (1 / 2, 1 / 4, 1 / 8),
    "layers.1.feed_forward.w3.weight": (1 / 2, 1 / 4, 1 / 8),
    "layers.1.attention.wo.weight": (sqrt(2) / 4, 1 / 8, 1 / 4),
    "layers.1.feed_forward.w2.weight": (sqrt(2) / 4, 1 / 8, 1 / 4),
    "norm.weight": (1, 1, 1 / 4),
    "head.weight": (1 / 4, 1 / 4, 1),
}
EXPERTS = {
    "layers.2.feed_forward.router.weight": (1 / 4, 1 / 4, 1 / 2),
    "layers.2.feed_forward.experts.w13": (1 / 2, 1 / 4, 1 / 8),
    "layers.2.feed_forward.experts.w2": (sqrt(2) / 4, 1 / 8, 1 / 4),
    "layers.2.feed_forward.shared.w2.weight": (sqrt(2) / 4, 1 / 8, 1 / 4),
}


def recipe(name: str, *options: str, rule: str = "completep", dim: int = 64, depth: int = 2) -> Config:
    base = [f"--optimizer.parametrization={rule}", f"--optimizer.mup.base_dim={dim}"]
    return load_config(["--config", name, *base, f"--optimizer.mup.base_depth={depth}", *options])


def shards_of(config: Config) -> list[Shard]:
    model = build_meta_model(config)
    heads = model.heads()
    return [Shard.whole(name, p, heads=heads.get(name, 1)) for name, p in model.named_parameters()]


@pytest.mark.parametrize(("name", "table"), [("debug", DENSE), ("moe_debug", DENSE | EXPERTS)])
def test_factors_match_the_table(name: str, table: dict[str, tuple[float, float, float]]) -> None:
    config = recipe(name)
    by_name = {shard.name: shard for shard in shards_of(config)}
    for parameter, (start, lr, eps) in table.items():
        if parameter in by_name:
            scale, rates = factors(by_name[parameter], config)
            assert (scale, rates.lr, rates.eps) == pytest.approx((start, lr, eps)), parameter


@pytest.mark.parametrize("rule", ["mup", "completep"])
@pytest.mark.parametrize("name", ["debug", "moe_debug", "mla_debug", "hybrid_debug", "k3_debug"])
@pytest.mark.parametrize("options", [[], ["--model.tie_embeddings=true", "--model.zero_centered_norms=true"]])
def test_with_the_sizes_of_the_base_nothing_changes(name: str, rule: str, options: list[str]) -> None:
    plain = load_config(["--config", name, *options])
    config = recipe(name, *options, rule=rule, dim=plain.model.dim, depth=plain.model.n_layers)
    shards, starts = shards_of(config), build_meta_model(config).initial_values()
    scaled, rated = parametrize(starts, shards, config)
    assert scaled == starts and all(shard.rates == Rates() for shard in rated)


def test_width_alone_counts_under_mup_and_depth_has_the_standard_rule() -> None:
    config = recipe("debug", rule="mup")
    by_name = {shard.name: factors(shard, config) for shard in shards_of(config)}
    assert by_name["layers.1.attention.wo.weight"] == (1 / 2, Rates(1 / 4, 1 / 2, 1 / 4))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], 1 / 2),  # its own factor grows with the square root of the width
        (["--optimizer.muon.adjust_lr=original"], 1),
        (["--optimizer.muon.adjust_lr=original", "--optimizer.muon.split_heads=true"], 1 / 2),
        (["--optimizer.muon.split_heads=true"], 1 / 4),
    ],
)
def test_orthogonal_updates_grow_as_the_square_root_of_rows_over_columns(
    options: list[str], expected: float
) -> None:
    config = recipe("debug", "--optimizer.name=muon", *options, rule="mup")
    by_name = {shard.name: factors(shard, config) for shard in shards_of(config)}
    assert by_name["layers.0.attention.wq.weight"][1].orthogonal == pytest.approx(expected)


def test_tied_embeddings_leave_the_factor_of_the_logits_to_the_final_norm() -> None:
    config = recipe("debug", "--model.tie_embeddings=true")
    starts, _ = parametrize(build_meta_model(config).initial_values(), shards_of(config), config)
    assert starts["norm.weight"] == 1 / 4 and starts["embedding.weight"] == Normal(0.02)
    config = recipe("debug", "--model.tie_embeddings=true", "--model.zero_centered_norms=true")
    starts, _ = parametrize(build_meta_model(config).initial_values(), shards_of(config), config)
    assert starts["norm.weight"] == 1 / 4 - 1


def test_larger_heads_divide_scores_by_their_size() -> None:
    options = ["--model.n_heads=2", "--model.n_kv_heads=2", "--optimizer.mup.base_head_dim=32"]
    for option, last in ((), "wq.weight"), (("--model.qk_norm=true",), "q_norm.weight"):
        config = recipe("debug", *options, *option, rule="mup")
        found = {shard.name: factors(shard, config)[1].lr for shard in shards_of(config)}
        ordinary = {"wq.weight": 1 / 4, "q_norm.weight": 1}
        for name, lr in ordinary.items():
            if f"layers.0.attention.{name}" in found:
                expected = lr / 2 if name == last else lr  # heads of 128, four times 32
                assert found[f"layers.0.attention.{name}"] == expected


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_a_multiplier_in_the_weights_trains_as_one_in_the_forward(name: str) -> None:
    """y = c W x with an ordinary W, and y = W x with W and its learning rate times c and eps over c."""
    config = load_config(["--config", "debug", f"--optimizer.name={name}", "--optimizer.weight_decay=0.3"])
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    c, outputs = 0.125, []
    for inside, outside in ((1.0, c), (c, 1.0)):
        weight = torch.nn.Parameter(start * inside)
        rates = Rates(lr=inside, orthogonal=inside, eps=1 / inside)
        shard = Shard.whole("layers.0.attention.wq.weight", weight, rates=rates)
        norm = torch.nn.Parameter(
            torch.ones(3, dtype=torch.float64)
        )  # AdamW updates a few parameters under Muon
        optimizer = build_optimizer([shard, Shard.whole("norm.weight", norm)], config.optimizer)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            x = torch.randn(5, 7, generator=generator, dtype=torch.float64)
            weight.grad = None
            (outside * weight @ x).square().sum().backward()
            optimizer.step(0.01, GO)
        outputs.append(outside * weight.detach())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-12)
    assert (outputs[0] - c * start).abs().max() > 0.001


def test_the_base_must_be_named() -> None:
    with pytest.raises(
        UserError, match=r"optimizer.mup.base_dim must be above 0|optimizer.mup.base_dim = 0.*above 0"
    ):
        load_config(["--config", "debug", "--optimizer.parametrization=mup"])
    with pytest.raises(UserError, match="base_depth"):
        load_config(
            ["--config", "debug", "--optimizer.parametrization=completep", "--optimizer.mup.base_dim=64"]
        )


MOE = '[model.moe]\nn_experts = 4\nexpert_dim = 24\nbalance = "bias"\n'
OPTIMIZER = (
    '\n[optimizer]\nname = "{}"\nparametrization = "completep"\nmup = {{ base_dim = 8, base_depth = 1 }}\n'
)


@pytest.mark.parametrize(
    ("name", "world", "layout", "model"),
    [
        ("adamw", 4, "tp = 2\npp = 2", MOE),
        pytest.param("muon", 2, "tp = 2", MOE, marks=pytest.mark.slow),
        pytest.param("muon", 2, 'data_parallel = "zero2"', MOE, marks=pytest.mark.slow),
        pytest.param("adamw", 4, "ep = 2", MOE, marks=pytest.mark.slow),
    ],
)
def test_a_layout_trains_as_one_process(name: str, world: int, layout: str, model: str) -> None:
    def text(parallel: str) -> str:
        return tiny_config(parallel=parallel, micro=2, model=model) + OPTIMIZER.format(name)

    whole = run_ranks(train_part, 1, text(""), "nowhere", 0, STEPS)[0]
    for found in run_ranks(train_part, world, text(layout), "nowhere", 0, STEPS):
        assert found["losses"] == pytest.approx(whole["losses"], rel=0, abs=TOLERANCE)
