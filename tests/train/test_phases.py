"""A phase's changes to the model, in this process."""

from forge.config import Phases, parse_toml_text
from forge.tools.verify.plain import plain_model
from forge.train.phases import apply_plan
from tests.support.equivalence import tiny_config

PATTERN = """
layer_pattern = ["full", "sliding", "linear"]
sliding_window = 24
[model.linear_attention]
n_key_heads = 2
n_value_heads = 4
key_head_dim = 8
value_head_dim = 6
"""


def test_a_window_applies_only_to_sliding_window_layers() -> None:
    model = plain_model(parse_toml_text(tiny_config(model=PATTERN)))
    before = [block.attention.window for block in model.layers.values()]
    config = parse_toml_text(tiny_config(model=PATTERN.replace("24", "8")))
    apply_plan(Phases(config).at(0), None, [model], object())
    assert before[1] == 24
    assert [block.attention.window for block in model.layers.values()] == [before[0], 8, before[2]]
