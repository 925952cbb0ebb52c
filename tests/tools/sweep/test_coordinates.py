"""Activations change by the same amount at every width under mup. Without it, the change grows with the width."""

from __future__ import annotations

import math

import pytest

from forge.config import Config, load_config
from forge.parallel.build import build_meta_model
from forge.runtime.errors import UserError
from forge.tools.sweep import coordinates
from forge.tools.sweep.coordinates import check_widths, growth, of_width

SMALL = [
    *(
        "--model.dim=32",
        "--model.n_layers=2",
        "--model.n_heads=2",
        "--model.n_kv_heads=1",
        "--model.ffn_dim=64",
    ),
    *("--model.vocab_size=64", "--data.sources=[{path='synthetic'}]", "--data.validation=[]"),
    *("--train.seq_len=16", "--train.global_batch_size=4", "--train.micro_batch_size=4"),
    *("--optimizer.lr=1e-2", "--optimizer.mup.base_dim=32"),
]
MOE = ["--model.moe.n_experts=4", "--model.moe.expert_dim=32", "--model.moe.n_dense_layers=0"]
WIDTHS = (32, 64, 128, 256, 512)


def recipe(*options: str) -> Config:
    return load_config(["--config", "debug", *SMALL, *options])


def test_balancing_losses_are_scaled_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    monkeypatch.setattr(
        coordinates, "build_meta_model", lambda config: models.append(build_meta_model(config)) or models[0]
    )
    coordinates.changes_of_activations(recipe(*MOE, "--model.moe.z_loss_coef=1e-3"), steps=1)
    scales = [router.loss_scale.item() for router in models[0].routers.values()]
    assert scales == [1 / (4 * 16)] * 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "least"),
    [([], 0.7), (MOE, 0.7), pytest.param(["--optimizer.name=muon"], 0.6, marks=pytest.mark.slow)],
)
def test_changes_of_activations_are_flat_over_five_widths(options: list[str], least: float) -> None:
    """Compare mup with the standard parametrization. Without mup, changes of attention and the stream grow with the width to
    the power `least` or more."""
    flat = check_widths(recipe("--optimizer.parametrization=mup", *options), WIDTHS, steps=3)
    steep = check_widths(recipe(*options), WIDTHS, steps=3)
    slopes = {name: growth(sizes) for name, sizes in flat.items()}
    assert all(abs(slope) < 0.45 for slope in slopes.values()), slopes
    assert sum(map(abs, slopes.values())) / len(slopes) < 0.2, slopes
    assert all(
        growth(sizes) > least for name, sizes in steep.items() if "attention" in name or "stream" in name
    )
    assert growth(steep["logits"]) > 0.3


def test_sizes_grow_in_proportion_or_are_refused() -> None:
    wide = of_width(recipe(*MOE), 64).model
    assert (wide.n_heads, wide.n_kv_heads, wide.head_dim, wide.ffn_dim) == (4, 2, 16, 128)
    assert wide.moe is not None and wide.moe.expert_dim == 64
    latent = of_width(recipe(*MOE, "--model.moe.latent_dim=16"), 64).model.moe
    assert latent is not None and latent.latent_dim == 32
    with pytest.raises(UserError, match="width 48"):
        of_width(recipe(), 48)


def test_a_width_out_of_range_is_refused_before_any_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(coordinates, "changes_of_activations")
    with pytest.raises(UserError, match=r"width 524288: model\.dim = 524288: "):
        check_widths(recipe(), [32, 524288], steps=1)


def test_a_layer_without_a_change_has_no_slope() -> None:
    assert math.isnan(growth({32: 0.0, 64: 0.0})) and math.isnan(growth({32: 1.0}))


def test_growth_is_the_power_of_the_width() -> None:
    assert growth({width: 3.0 * width**0.5 for width in WIDTHS}) == pytest.approx(0.5)
