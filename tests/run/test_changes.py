"""Differences between a checkpoint's configuration and the run's are logged, refused or warned about."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from forge.checkpoint.folders import step_name
from forge.config import Config, load_config, to_toml
from forge.run.changes import check_data, compare_for_init, compare_for_resume
from forge.runtime.errors import BAD_CONFIG, UserError

MOE = ["--model.moe.n_experts=4", "--model.moe.expert_dim=32"]
DECAYING = ["--schedule.name=wsd", "--schedule.warmup_steps=0", "--schedule.decay_fraction=0.2"]


def config(*options: str) -> Config:
    return load_config(["--config=debug.toml", "--optimizer.lr=0.001", *options])


def checkpoint(folder: Path, step: int, *options: str) -> Path:
    """Write the part of a checkpoint read by these checks."""
    path = folder / step_name(step)
    path.mkdir()
    (path / "config.toml").write_text(to_toml(config(*options)))
    (path / "manifest.json").touch()
    return path


@pytest.mark.parametrize(
    "option",
    [
        "model.n_kv_heads=1",
        "model.norm_eps=0.01",
        "model.attention_soft_cap=30.0",
        "model.kind=package.module:Class",
        "model.moe.top_k=1",
        "model.moe.score_function=sigmoid",
        "model.moe.route_scale=2.5",
        "model.moe.normalize_top_k=false",
    ],
)
def test_init_refuses_a_different_model_with_the_same_weights_unless_named(
    tmp_path, caplog, option: str
) -> None:
    caplog.set_level(logging.INFO)
    key, _, value = option.partition("=")
    path = checkpoint(tmp_path, 10, *MOE)
    with pytest.raises(UserError) as error:
        compare_for_init(path, config(*MOE, f"--{option}"))
    assert error.value.exit_code == BAD_CONFIG
    assert f"  {key}: " in str(error.value) and f'checkpoint.init_changes = ["{key}"]' in str(error.value)
    compare_for_init(path, config(*MOE, f"--{option}", f'--checkpoint.init_changes=["{key}"]'))
    [line] = caplog.messages
    assert line.startswith(f"checkpoint.init: {key} = ") and value.strip('"').title() in line.title()


@pytest.mark.parametrize(
    "options",
    [
        ["--model.rope_theta=2e6"],
        ["--model.rope_scaling={kind='yarn',factor=4.0,original_max_position=256}", "--train.seq_len=512"],
        ["--model.sliding_window=64"],
        ["--model.moe.balance=aux_loss"],
        ["--model.init_std=0.01"],
    ],
)
def test_init_accepts_and_logs_a_longer_context_and_another_training_setup(
    tmp_path, caplog, options: list[str]
) -> None:
    caplog.set_level(logging.INFO)
    compare_for_init(checkpoint(tmp_path, 10, *MOE), config(*MOE, *options))
    assert options[0].removeprefix("--").partition("=")[0] in caplog.text


def test_init_is_silent_about_an_equal_model_in_another_run(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    compare_for_init(
        checkpoint(tmp_path, 10), config("--train.steps=7", "--optimizer.lr=0.1", "--run.seed=9")
    )
    assert not caplog.messages


def test_more_steps_after_a_decay_are_a_warning_that_names_the_checkpoint_before_it(tmp_path, caplog) -> None:
    options = [*DECAYING, "--train.steps=100"]
    for step in (60, 80, 90):
        checkpoint(tmp_path, step, *options)
    last = checkpoint(tmp_path, 100, *options)
    compare_for_resume(last, 100, config(*DECAYING, "--train.steps=200"))
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "jumps from 0.0001 in step 100 to 0.001 in step 101" in warning
    assert "decayed since step 80" in warning and str(tmp_path / step_name(80)) in warning


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (90, ["--train.steps=100"]),
        (80, ["--train.steps=200"]),
        (100, ["--train.steps=200", "--optimizer.lr=0.0001"]),
        (90, ["--train.steps=50"]),
    ],
    ids=["the same run", "not yet decayed", "at the rate it had reached", "fewer steps than it has made"],
)
def test_no_jump_no_warning(tmp_path, caplog, step: int, options: list[str]) -> None:
    path = checkpoint(tmp_path, step, *DECAYING, "--train.steps=100")
    compare_for_resume(path, step, config(*DECAYING, *options))
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("saved", [[60, 80], []], ids=["with checkpoints", "without checkpoints"])
def test_advice_at_a_start_from_a_node_local_state_names_a_checkpoint(
    tmp_path, caplog, saved: list[int]
) -> None:
    """checkpoint.init and checkpoint.resume cannot load a node-local state."""
    options = [*DECAYING, "--train.steps=100"]
    local, shared = tmp_path / "local", tmp_path / "shared"
    local.mkdir()
    shared.mkdir()
    checkpoint(local, 70, *options)
    state = checkpoint(local, 90, *options)
    for step in saved:
        checkpoint(shared, step, *options)
    compare_for_resume(state, 90, config(*DECAYING, "--train.steps=200"), shared=shared)
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    before = f"the last checkpoint before the decay is {shared / step_name(80)}"
    assert warning.endswith(before if saved else "no checkpoint before the decay is left")
    with pytest.raises(UserError) as refused:
        compare_for_resume(state, 90, config(*options, "--run.seed=9"), shared=shared)
    with pytest.raises(UserError) as changed:
        check_data(state, {"data.tokenizer": "a"}, {"data.tokenizer": "b"}, config(*options), shared)
    advice = f"with checkpoint.init = '{shared / step_name(80)}' to keep the weights."
    for error in (refused, changed):
        none = "(another run.name); the run has no checkpoint for checkpoint.init."
        assert str(error.value).endswith(advice if saved else none)


SOURCES = "--data.sources=[{path='a',weight=1.0},{path='b',weight=2.0,max_epochs=4.0}]"
FINGERPRINTS = {
    "data.sources[0].path": "aaaa",
    "data.sources[0].weight": 1.0,
    "data.sources[1].path": "bbbb",
    "data.sources[1].weight": 0.187765,
    "data.sources[1].max_epochs": 69236,
}
"""What a run with data.temperature = 2 records of these sources; weights and caps are computed."""


@pytest.mark.parametrize(
    ("options", "changed", "expected"),
    [
        (
            ["--data.temperature=1"],
            {"data.sources[1].weight": 0.117519},
            "data.temperature differs from PATH: 2 in the checkpoint, 1 now. Set data.temperature back",
        ),
        (
            [SOURCES.replace("max_epochs=4.0", "max_epochs=0.0")],
            {"data.sources[1].max_epochs": None},
            "data.sources[1].max_epochs differs from PATH: 4 in the checkpoint, 0 now. Set data.sources[1].max_epochs back",
        ),
        (
            [SOURCES.replace("weight=2.0", "weight=3.5")],
            {"data.sources[1].weight": 0.3},
            "data.sources[1].weight differs from PATH: 2 in the checkpoint, 3.5 now. Set data.sources[1].weight back",
        ),
        (
            ["--data.on_max_epochs=refuse"],
            {"data.sources[1].max_epochs": None},
            "data.on_max_epochs differs from PATH: leave_out in the checkpoint, refuse now. Set data.on_max_epochs back",
        ),
        (
            [SOURCES.replace("[{", "[{path='unused',weight=0.0},{").replace("weight=2.0", "weight=3.0")],
            {"data.sources[1].weight": 0.3},
            "data.sources[2].weight differs from PATH: 2 in the checkpoint, 3 now",
        ),
        (
            [],
            {"data.sources[1].weight": 0.19},
            "data.sources[1].weight (computed with data.temperature and the size of the source) differs from PATH: "
            "0.187765 in the checkpoint, 0.19 now",
        ),
        (
            [SOURCES.replace("'b'", "'c'")],
            {"data.sources[1].path": "cccc"},
            "data.sources[1].path differs from PATH: fingerprint bbbb in the checkpoint, fingerprint cccc now. Restore",
        ),
        (
            [SOURCES.replace("[{", "[{path='unused',weight=0.0},{")],
            {"data.sources[1].path": "cccc"},
            "data.sources[2].path differs from PATH: fingerprint bbbb in the checkpoint, fingerprint cccc now. Restore",
        ),
        (
            ["--data.packing=document"],
            {"data.sources[0].path": "cccc", "data.sources[1].path": "dddd"},
            "data.packing differs from PATH: stream in the checkpoint, document now. Set data.packing back",
        ),
    ],
)
def test_a_changed_mixture_is_refused_with_the_users_keys_and_values(
    tmp_path, caplog, options: list[str], changed: dict[str, object], expected: str
) -> None:
    path = checkpoint(tmp_path, 10, SOURCES, "--data.temperature=2")
    new = config(SOURCES, "--data.temperature=2", *options)
    inputs = {key: value for key, value in {**FINGERPRINTS, **changed}.items() if value is not None}
    expected = expected.replace("PATH", str(path))
    with pytest.raises(UserError) as error:
        check_data(path, FINGERPRINTS, inputs, new)
    assert str(error.value).startswith(expected) and "checkpoint.allow_changed_data = true" in str(
        error.value
    )
    assert ("fingerprint" in str(error.value)) == (".path differs" in expected)
    allowed = config(SOURCES, "--data.temperature=2", *options, "--checkpoint.allow_changed_data=true")
    changes = check_data(path, FINGERPRINTS, inputs, allowed)
    assert len(changes) == 1 and expected.startswith(changes[0]) and changes == caplog.messages
