"""The picture of loads: who is at, above and below an even share can be told by colour."""

import numpy as np

from forge.observe.router_load import CELL, colors, expert_map


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
