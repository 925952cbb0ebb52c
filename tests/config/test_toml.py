"""A written configuration loads again unchanged."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import Config, difference, load_config, parse_toml_text, to_toml
from forge.config.keys import read_toml, to_literal
from forge.config.load import CONFIGS
from tests.support.configs import TINY, tiny

SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.toml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_loads_again_to_itself(name: str) -> None:
    config = load_config(["--config", name])
    assert parse_toml_text(to_toml(config)) == config


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAME = TEXT.filter(bool)
NUMBER = st.floats(0, allow_nan=False, allow_infinity=False)
SOURCE = st.fixed_dictionaries({"path": NAME, "weight": st.floats(0.1, 9)})
KEYS = {
    "run": {"output_dir": NAME, "seed": st.integers(0, 10**30)},
    "optimizer": {
        "eps": st.floats(1e-30, allow_infinity=False),
        "weight_decay": NUMBER,
        "no_decay": st.lists(NAME, max_size=9),
    },
    "evaluate": {"sample_prompt": TEXT, "sample_temperature": NUMBER},
    "pipeline": {
        "layers_per_stage": st.one_of(st.integers(0, 9), st.lists(st.integers(0, 9), min_size=1, max_size=3))
    },
    "parallel": {
        "reshard_after_forward": st.sampled_from(["never", 4]),
        "dp_shard": st.just(2),
    },
    "precision": {"float8_all_gather": st.sampled_from(["auto", True, False])},
    "data": {"sources": st.lists(SOURCE, min_size=1, max_size=4)},
}
TABLES = {section: st.fixed_dictionaries(values) for section, values in KEYS.items()}


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries(TABLES), st.booleans())
def test_any_config_loads_again_to_itself(tables, scaled: bool) -> None:
    tree = tiny().model_dump(mode="json") | tables
    if scaled:
        tree["model"]["rope_scaling"] = {"kind": "yarn", "factor": 1 / 3, "original_max_position": 7}
    config = Config.model_validate(tree)
    assert parse_toml_text(to_toml(config)) == config


@pytest.mark.long
@given(st.recursive(st.one_of(st.booleans(), st.integers(), TEXT, st.floats(allow_nan=False)), st.lists))
def test_a_literal_reads_back_exactly(value) -> None:
    assert read_toml(f"x = {to_literal(value)}")["x"] == value


def test_absent_keys_are_left_out_and_sections_have_a_comment() -> None:
    text = to_toml(tiny())
    assert "moe" not in text and "rope_scaling" not in text and "None" not in text
    assert "# The batch size, the sequence length and the number of steps.\n[train]\nsteps = 10\n" in text


def test_long_lists_get_a_line_for_each_item() -> None:
    config = tiny().model_copy(
        update={"data": tiny().data.model_copy(update={"sources": tiny().data.sources * 5})}
    )
    lines = to_toml(config).splitlines()
    assert sum(line.startswith('    { path = "synthetic"') for line in lines) == 5


def test_difference_names_changed_keys_in_schema_order() -> None:
    old = tiny()
    scaling = '[model.rope_scaling]\nkind = "yarn"\nfactor = 2\noriginal_max_position = 4\n'
    new = parse_toml_text(TINY.replace("steps = 10", "steps = 20") + "[optimizer]\nlr = 0.5\n" + scaling)
    changes = difference(old, new)
    assert ("train.steps", 10, 20) in changes and ("optimizer.lr", 3e-4, 0.5) in changes
    assert ("model.rope_scaling.kind", None, "yarn") in changes
    names = [name for name, _, _ in changes]
    assert names.index("model.rope_scaling.kind") < names.index("train.steps") < names.index("optimizer.lr")
    assert difference(old, old) == []
