"""Bad input gets one clear message, exit code 2 and no traceback, and leaves no files."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.runs import Run, refused, sources
from tests.support.trained import prepare_bytes


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Return a small byte-level dataset."""
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 200)
    prepare_bytes(text, folder / "shards")
    return folder / "shards"


def test_unknown_keys_wrong_types_and_impossible_combinations_are_all_reported_at_once(tmp_path) -> None:
    output = refused(Run(tmp_path), "--model.dimm=3", "--train.steps=ten", "--model.n_heads=5")
    assert "model.dimm" in output and "model.dim" in output
    assert "train.steps" in output
    assert "model.n_heads" in output


def test_a_missing_config_is_reported_with_the_nearest_name(tmp_path) -> None:
    run = Run(tmp_path)
    run._options = ["--config=debgu.toml"]
    assert "debug" in refused(run)


def test_an_indivisible_batch_is_reported_with_the_equation(tmp_path) -> None:
    output = refused(Run(tmp_path), "--train.micro_batch_size=3", world=2)
    assert "train.global_batch_size = 8" in output and "3 * 1 * 2" in output


def test_degrees_that_do_not_multiply_to_the_world_size_are_reported_with_the_equation(tmp_path) -> None:
    assert "dp_shard" in refused(Run(tmp_path), "--parallel.dp_shard=3", world=2)


def test_missing_data_is_reported_before_training(tmp_path) -> None:
    assert str(tmp_path / "nowhere") in refused(Run(tmp_path), sources(tmp_path / "nowhere"), world=2)


def test_d1_a_truncated_shard_is_reported_with_its_file(tmp_path, shards) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(shards, broken)
    file = max(broken.iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-100])
    output = refused(Run(tmp_path), sources(broken), "--data.tokenizer=bytes", "--model.vocab_size=258")
    assert file.name in output


def test_shards_of_another_tokenizer_are_refused(tmp_path, shards) -> None:
    other = tmp_path / "other"
    shutil.copytree(shards, other)
    index = json.loads((other / "dataset.json").read_text())
    key = next(key for key in index if "tokenizer" in key)
    index[key] = "0" * 64
    (other / "dataset.json").write_text(json.dumps(index))
    output = refused(Run(tmp_path), sources(other), "--data.tokenizer=bytes", "--model.vocab_size=258")
    assert "tokenizer" in output or "dataset.json" in output


def test_d1_token_ids_beyond_the_vocabulary_are_refused(tmp_path, shards) -> None:
    output = refused(Run(tmp_path), sources(shards), "--data.tokenizer=bytes", "--model.vocab_size=64")
    assert "model.vocab_size" in output


def test_s3_an_impossible_output_folder_is_reported_at_the_start(tmp_path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert "run.output_dir" in refused(Run(tmp_path), f"--run.output_dir={tmp_path / 'file' / 'runs'}")


def test_a_missing_checkpoint_to_resume_is_reported(tmp_path) -> None:
    absent = tmp_path / "absent"
    for folder, why in ((tmp_path, "holds no complete checkpoint"), (absent, "does not exist")):
        output = refused(Run(tmp_path), f"--checkpoint.resume={folder}", code=2)
        assert f"checkpoint.resume = {folder}: {why}; name a checkpoint" in output


def test_a_run_in_place_of_a_checkpoint_is_reported_with_its_newest_checkpoint(tmp_path) -> None:
    first = Run(tmp_path / "first")
    assert first("--train.steps=2") == 0
    for key in ("resume", "init"):
        output = refused(Run(tmp_path / "second"), f"--checkpoint.{key}={first.path}", code=2)
        assert f"did you mean '{first.path / 'checkpoints' / 'step-00000002'}'?" in output


def test_initial_weights_of_another_shape_are_reported(tmp_path) -> None:
    first = Run(tmp_path / "first")
    assert first("--train.steps=2") == 0
    folder = first.path / "checkpoints" / "step-00000002"
    output = refused(Run(tmp_path / "second"), f"--checkpoint.init={folder}", "--model.ffn_dim=96")
    assert "w1.weight" in output and "64x32" in output and "96x32" in output


def test_a_run_on_text_carries_its_tokenizer_in_the_checkpoint(tmp_path, shards) -> None:
    from forge.data.tokenizer import load_tokenizer

    run = Run(tmp_path, sources(shards), "--data.tokenizer=bytes", "--model.vocab_size=258")
    assert run("--train.steps=2", "--evaluate.sample_interval=2", "--evaluate.sample_tokens=8") == 0
    saved = load_tokenizer(run.path / "checkpoints" / "step-00000002" / "tokenizer")
    assert saved.decode(saved.encode("clocks")) == "clocks"
    assert "sample:" in run.log()
