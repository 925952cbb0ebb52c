"""Expert load as fields of a metrics line, against hand calculations, and as an image."""

import math

import numpy as np
import pytest

from forge.config.model import MoEConfig
from forge.observe.router_load import CELL, colors, expert_map, load_fields

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


def test_disabled_losses_are_left_out_and_a_layer_without_tokens_is_safe() -> None:
    fields = load_fields([0.0] * 9, layers=[0], moe=MoEConfig(n_experts=4, top_k=2, expert_dim=8))
    assert not {"aux_loss", "router_z_loss"} & set(fields)
    assert (
        fields["expert_load_max"] == fields["expert_dropped"] == fields["routers"]["0"]["load_entropy"] == 0
    )


def test_an_even_share_is_white_more_is_red_less_is_blue() -> None:
    even, more, less, same = colors([[10, 20, 5, 5]])[0]
    assert even.tolist() == [247, 247, 247]
    assert more[0] > more[1] and more[0] > more[2]
    assert less[2] > less[0] and np.array_equal(less, same)


def test_colours_end_at_a_quarter_and_at_four_times() -> None:
    (row,) = colors([[8, 4, 0, 0, 0, 0, 0, 0] * 2])
    assert row[2].tolist() == [33, 102, 172]
    assert colors([[64] + [0] * 63])[0, 0].tolist() == colors([[4, 0, 0, 0]])[0, 0].tolist() == [178, 24, 43]


def test_a_layer_without_tokens_can_be_drawn() -> None:
    assert colors([[0, 0]]).shape == (1, 2, 3)


def test_rows_are_layers_and_columns_experts() -> None:
    pixels = expert_map([[1, 1, 1], [3, 0, 0]])
    assert pixels.shape == (2 * CELL, 3 * CELL, 3) and pixels.dtype == np.uint8
    assert (pixels[:CELL] == 247).all()
    assert (pixels[CELL:, :CELL] == pixels[CELL, 0]).all()
    assert not (pixels[CELL:, CELL:] == pixels[CELL, 0]).all()
