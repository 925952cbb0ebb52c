"""`ladder.depth` gives the sizes, the batch and the tokens of a model; keys that are set keep their values."""

from __future__ import annotations

import pytest
import torch

from forge.config import Config, load_config, parse_toml_text, to_toml
from forge.model import build_model
from forge.runtime.errors import UserError


def ladder(*options: str) -> Config:
    return load_config(["--config=ladder", *options])


@pytest.mark.parametrize("depth", [2, 3, 8, 28])
def test_tokens_are_counted_from_the_models_parameters(depth: int) -> None:
    config = ladder(f"--ladder.depth={depth}")
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build_model(config.model, config.train.seq_len).parameters())
    assert config.train.tokens == pytest.approx(20 * parameters, rel=2e-3)
    assert config.train.tokens <= 20 * parameters  # without norms
    batch = config.train.global_batch_size * config.train.seq_len
    assert config.train.tokens <= config.train.steps * batch < config.train.tokens + batch


def test_depth_gives_sizes_and_batch() -> None:
    model, train = (one := ladder("--ladder.depth=4")).model, one.train
    assert (model.dim, model.n_layers, model.n_heads, model.n_kv_heads, model.head_dim) == (256, 4, 4, 4, 64)
    assert model.ffn_dim == 704 and train.global_batch_size == 64


def test_a_key_on_the_command_line_keeps_its_value() -> None:
    config = ladder(
        "--ladder.depth=4", "--model.ffn_dim=96", "--train.steps=7", "--train.global_batch_size=8"
    )
    assert (config.model.ffn_dim, config.train.steps, config.train.tokens) == (96, 7, 0)
    assert config.train.global_batch_size == 8 and config.model.dim == 256
    halved = ladder("--ladder.depth=4", "--ladder.tokens_per_parameter=10")
    assert halved.train.tokens * 2 == ladder("--ladder.depth=4").train.tokens


def test_depth_on_the_command_line_replaces_the_sizes_of_a_file() -> None:
    config = load_config(["--config=debug", "--ladder.depth=3"])
    assert (config.model.dim, config.model.n_kv_heads, config.train.global_batch_size) == (192, 3, 32)
    assert config.train.tokens == 20 * (3 * (4 * 192**2 + 3 * 192 * 512) + 2 * 4096 * 192)


def test_depth_in_a_file_gives_way_to_the_keys_of_the_file() -> None:
    config = ladder("--ladder.depth=4", "--model.dim=128")
    again = parse_toml_text(to_toml(config))
    assert again == config and again.model.dim == 128


def test_off_it_changes_nothing() -> None:
    assert load_config(["--config=debug", "--ladder.depth=0"]) == load_config(["--config=debug"])
    with pytest.raises(UserError, match=r"model\.dim: missing"):
        ladder("--ladder.depth=0")


@pytest.mark.parametrize("value", ["deep", "-1", "2.5", "true"])
def test_a_wrong_depth_is_the_only_problem(value: str) -> None:
    with pytest.raises(UserError) as found:
        ladder(f"--ladder.depth={value}")
    assert str(found.value).startswith("ladder.depth = ") and "\n" not in str(found.value)


@pytest.mark.parametrize("value", ["inf", "nan", "20x", "true"])
def test_a_wrong_number_of_tokens_per_parameter_is_the_problem(value: str) -> None:
    with pytest.raises(UserError, match=r"ladder\.tokens_per_parameter = "):
        ladder("--ladder.depth=40", f"--ladder.tokens_per_parameter={value}")


def test_a_problem_names_the_dial() -> None:
    with pytest.raises(UserError, match=r"model\.dim = 192 \(from ladder\.depth = 3\): must be a multiple"):
        ladder("--ladder.depth=3", "--model.head_dim=0", "--model.n_heads=7", "--model.n_kv_heads=7")
