"""A forged checkpoint with a consistent manifest and checksums is refused, without a hang or a leak."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from forge.checkpoint.loading import TensorReader
from forge.checkpoint.manifest import MANIFEST, Damaged, compose, entry, read_manifest
from forge.run.launch import main as train
from forge.runtime.errors import NO_CHECKPOINT, UserError
from forge.tools.inference.average import average
from forge.tools.inference.open import open_checkpoint
from tests.support.runs import BASE
from tests.support.strangers import edit_index, sign

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    from tests.support.runs import Run

    run = Run(tmp_path_factory.mktemp("saved"), "--train.steps=2")
    assert run() == 0
    return run.path / "checkpoints" / "step-00000002"


@pytest.fixture
def checkpoint(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "step-00000002"))


def refusal(checkpoint: Path) -> str:
    """Return the refusal, after asserting that every reader gives the same one."""
    with pytest.raises(UserError) as opened:
        open_checkpoint(checkpoint, CPU)
    with pytest.raises(UserError) as averaged:
        average([checkpoint], checkpoint.parent / "mean")
    assert opened.value.exit_code == averaged.value.exit_code == NO_CHECKPOINT
    assert str(opened.value) == str(averaged.value)
    return str(opened.value)


def outside(index: Any, checkpoint: Path) -> None:
    for place in index.storage_data.values():
        shutil.copy(checkpoint / place.relative_path, checkpoint.parent / "outside.distcp")
        place.relative_path = "../outside.distcp"


def unlisted(index: Any, checkpoint: Path) -> None:
    for place in index.storage_data.values():
        shutil.copy(checkpoint / place.relative_path, checkpoint / "unlisted.distcp")
        place.relative_path = "unlisted.distcp"


def after_the_end(index: Any, checkpoint: Path) -> None:
    next(iter(index.storage_data.values())).offset = 1 << 40


def absurd(index: Any, checkpoint: Path) -> None:
    next(iter(index.state_dict_metadata.values())).size = torch.Size([1 << 40, 1 << 20])


@pytest.mark.parametrize(
    ("forge", "sentence"),
    [
        (outside, "refers to ../outside.distcp, which is not a file of the checkpoint"),
        (unlisted, "refers to unlisted.distcp, which is not a file of the checkpoint"),
        (after_the_end, "refers to bytes after the end of"),
        (absurd, "but all files together have"),
    ],
)
def test_an_index_pointing_outside_its_files_is_refused(
    checkpoint: Path, forge: Callable[[Any, Path], None], sentence: str
) -> None:
    edit_index(checkpoint, lambda index: forge(index, checkpoint))
    names = set(read_manifest(checkpoint)["files"]) - {"unlisted.distcp"}
    sign(checkpoint, names)
    assert sentence in refusal(checkpoint)


def test_chunks_with_an_overlap_and_a_gap_are_refused(checkpoint: Path) -> None:
    """The numbers of elements are consistent."""

    def overlap(index: Any) -> None:
        saved = index.state_dict_metadata["model.embedding.weight"]
        rows, width = saved.size
        (whole,) = saved.chunks
        place = next(p for key, p in index.storage_data.items() if key.fqn == "model.embedding.weight")
        for key in [key for key in index.storage_data if key.fqn == "model.embedding.weight"]:
            kind = type(key)
            del index.storage_data[key]
        half = torch.Size([rows // 2, width])
        saved.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), half)] * 2
        index.storage_data[kind("model.embedding.weight", torch.Size([0, 0]), 0)] = place

    edit_index(checkpoint, overlap)
    sign(checkpoint)
    with pytest.raises(ValueError, match=r"the index has a gap or an overlap in model\.embedding\.weight"):
        TensorReader(checkpoint).read("model.embedding.weight")
    with pytest.raises(UserError, match="has a gap or an overlap"):
        open_checkpoint(checkpoint, CPU)


@pytest.mark.parametrize("name", ["config.toml", "trainer.json", ".metadata", "unlisted", "tokenizer"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_links_to_devices_are_refused_at_once(checkpoint: Path, name: str, kind: str) -> None:
    path = checkpoint / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert f"{name} is not a regular file" in refusal(checkpoint)


def test_a_pipe_in_place_of_a_manifest_is_refused(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    os.mkfifo(checkpoint / MANIFEST)
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        open_checkpoint(checkpoint, CPU)
    with pytest.raises(UserError, match=f"has no {MANIFEST}"):
        average([checkpoint], checkpoint.parent / "mean")
    with pytest.raises(Damaged, match="is not a regular file"):
        read_manifest(checkpoint)


def test_a_pipe_listed_as_an_empty_file_is_refused(checkpoint: Path) -> None:
    os.mkfifo(checkpoint / "pipe")
    manifest = read_manifest(checkpoint)
    empty = {"size": 0, "sha256": entry(Path(os.devnull))["sha256"]}
    text = compose(2, manifest["world_size"], manifest["layout"], manifest["files"] | {"pipe": empty})
    (checkpoint / MANIFEST).write_text(text)
    assert "pipe is not a regular file" in refusal(checkpoint)


def test_a_deeply_nested_manifest_is_damage(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text("[" * 100_000)
    assert f"{MANIFEST} cannot be read: lists or objects are nested too deeply" in refusal(checkpoint)


def test_a_config_with_more_layers_than_tensors_is_refused_before_anything_is_built(checkpoint: Path) -> None:
    edit_config(checkpoint, "n_layers = 2", "n_layers = 9999")
    with pytest.raises(UserError, match=r"model\.n_layers = 9999, but the checkpoint has only"):
        open_checkpoint(checkpoint, CPU)


def test_a_config_with_other_shapes_is_refused_before_memory_is_taken(checkpoint: Path) -> None:
    edit_config(checkpoint, "ffn_dim = 64", "ffn_dim = 1000000000000")
    with pytest.raises(UserError, match=r"in the checkpoint and .* in the model"):
        open_checkpoint(checkpoint, CPU)


def test_a_deeply_nested_config_is_one_sentence(checkpoint: Path, tmp_path, capfd) -> None:
    deep = "x = " + "[" * 100_000
    (checkpoint / "config.toml").write_text(deep)
    sign(checkpoint)
    with pytest.raises(UserError, match="nested too deeply"):
        open_checkpoint(checkpoint, CPU)
    (tmp_path / "deep.toml").write_text(deep)
    assert train([f"--config={tmp_path / 'deep.toml'}"]) == 2
    assert "nested too deeply" in capfd.readouterr().err
    assert train([*BASE, "--train.steps=" + "[" * 100_000]) == 2
    (tmp_path / "digits.toml").write_text("x = " + "1" * 5_000_000)
    assert train([f"--config={tmp_path / 'digits.toml'}"]) == 2


def edit_config(checkpoint: Path, old: str, new: str) -> None:
    config = checkpoint / "config.toml"
    text = config.read_text()
    assert text.count(old) == 1
    config.write_text(text.replace(old, new))
    sign(checkpoint)


MODULE = """
from pathlib import Path
Path({mark!r}).touch()
from forge.model.transformer import Transformer
class Own(Transformer):
    pass
"""


def test_a_checkpoints_class_is_imported_only_with_trust(checkpoint, tmp_path, monkeypatch) -> None:
    mark = tmp_path / "imported"
    (tmp_path / "stranger.py").write_text(MODULE.format(mark=str(mark)))
    monkeypatch.syspath_prepend(tmp_path)
    edit_config(checkpoint, 'kind = "transformer"', 'kind = "stranger:Own"')
    with pytest.raises(UserError, match=r'model\.kind = "stranger:Own" is an import path.*--trust'):
        open_checkpoint(checkpoint, CPU)
    average([checkpoint], tmp_path / "mean")
    assert not mark.exists()
    opened = open_checkpoint(checkpoint, CPU, trust=True)
    assert mark.exists() and type(opened.model).__name__ == "Own"


def test_paths_of_hooks_and_optimizers_are_imported_only_for_use(checkpoint: Path) -> None:
    edit_config(checkpoint, "hooks = []", 'hooks = ["nowhere:Hook"]')
    edit_config(checkpoint, 'name = "adamw"', 'name = "nowhere:Optimizer"')
    assert open_checkpoint(checkpoint, CPU).step == 2


def test_a_transformers_folder_is_refused_with_the_conversion_command(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"convert\.py from-hf --input"):
        open_checkpoint(tmp_path, CPU)


def test_average_refuses_a_damaged_checkpoint_and_writes_nothing(checkpoint: Path, tmp_path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert f"checkpoint {checkpoint} is damaged: {file.name} has a wrong checksum" in refusal(checkpoint)
    assert not (tmp_path / "mean").exists()
    with pytest.raises(UserError, match=f"has no {MANIFEST}"):
        average([tmp_path], tmp_path / "mean")
