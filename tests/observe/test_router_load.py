"""The load of experts as fields of a metrics line, by hand."""

import math

import pytest

from forge.config.model import MoEConfig
from forge.observe.router_load import load_fields

# counts of 4 experts | balancing loss, z-loss | dropped | lowest and highest bias
EVEN = [10.0, 10.0, 10.0, 10.0, 1.0, 0.5, 0.0, -0.1, 0.2]
ONE_TAKES_HALF = [20.0, 10.0, 10.0, 0.0, 1.5, 0.25, 4.0, -0.3, 0.0]


def test_extremes_are_over_layers_sums_and_shares_are_of_all_choices() -> None:
    moe = MoEConfig(n_experts=4, top_k=2, expert_dim=8, balance="aux_loss", z_loss_coef=0.1)
    fields = load_fields(EVEN + ONE_TAKES_HALF, layers=[1, 3], moe=moe)
    layers = fields.pop("routers")
    assert fields == {
        "expert_load_max": 2.0,
        "expert_load_min": 0.0,
        "aux_loss": 2.5,
        "router_z_loss": 0.75,
        "expert_dropped": 0.05,
    }
    assert layers["1"] == {
        "load_max": 1.0,
        "load_min": 1.0,
        "load_entropy": pytest.approx(1.0),
        "bias_min": -0.1,
        "bias_max": 0.2,
    }
    assert layers["3"]["load_entropy"] == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(4)) / math.log(4))


def test_losses_that_are_off_are_left_out_and_a_layer_without_tokens_divides_by_nothing() -> None:
    fields = load_fields([0.0] * 9, layers=[0], moe=MoEConfig(n_experts=4, top_k=2, expert_dim=8))
    assert not {"aux_loss", "router_z_loss"} & set(fields)
    assert (
        fields["expert_load_max"] == fields["expert_dropped"] == fields["routers"]["0"]["load_entropy"] == 0
    )
