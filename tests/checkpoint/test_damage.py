"""Damage is found, named and passed over; nothing in a checkpoint can run code."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from forge.checkpoint import Checkpoints, load
from forge.checkpoint.manifest import MANIFEST, Damaged, compose, entry, read_manifest
from forge.errors import NO_CHECKPOINT, UserError
from tests.checkpoint.helpers import loaded_value, named, names, save_value, value_shards
from tests.harness import run_ranks


def save_steps(rank: int, world: int, folder: str, last: int = 2) -> None:
    checkpoints = Checkpoints(Path(folder), mode="sync")
    for step in range(1, last + 1):
        save_value(checkpoints, step)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def find_and_save(rank: int, world: int, folder: str) -> list[str]:
    checkpoints = Checkpoints(Path(folder), mode="sync")
    assert checkpoints.latest() == 1 and loaded_value(checkpoints, 1) == 1.0
    fallbacks = checkpoints.fallbacks
    save_value(checkpoints, 2, value=7.0)
    assert checkpoints.latest() == 2 and loaded_value(checkpoints, 2) == 7.0
    assert checkpoints.fallbacks == []
    return fallbacks


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("__1_0.distcp", cut_short, "bytes instead of"),
    ("__1_0.distcp", os.unlink, "cannot be read"),
    ("__1_0.distcp", flip, "wrong checksum"),
    ("trainer.json", flip, "wrong checksum"),
    (".metadata", flip, "wrong checksum"),
    ("manifest.json", flip, "manifest.json"),
]


@pytest.mark.parametrize("name, damage, reason", DAMAGE, ids=[f"{d[1].__name__}-{d[0]}" for d in DAMAGE])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(name, damage, reason, tmp_path):
    run_ranks(save_steps, 2, str(tmp_path))
    damage(tmp_path / "step-00000002" / name)
    one, other = run_ranks(find_and_save, 2, str(tmp_path))
    assert one == other and len(one) == 1 and name in one[0] and reason in one[0]
    assert names(tmp_path) == [".damaged-step-00000002", "step-00000001", "step-00000002"]


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path):
    (tmp_path / "a").write_bytes(b"content")
    text = compose(10, 2, {"tp": 1.5e-30, "é": None}, {"a": entry(tmp_path / "a")}).encode()
    (tmp_path / MANIFEST).write_bytes(text)
    assert read_manifest(tmp_path)["step"] == 10
    for bit in range(8 * len(text)):
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / MANIFEST).write_bytes(changed)
        with pytest.raises(Damaged):
            read_manifest(tmp_path)


def test_a_manifest_may_not_name_files_outside(tmp_path):
    (tmp_path / MANIFEST).write_text(compose(1, 1, {}, {"../secret": {"size": 0, "sha256": ""}}))
    with pytest.raises(Damaged, match="outside"):
        read_manifest(tmp_path)


def no_checkpoint(rank: int, world: int, folder: str) -> str:
    checkpoints = Checkpoints(Path(folder))
    for _ in range(2):
        with pytest.raises(UserError) as error:
            checkpoints.latest()
        assert error.value.exit_code == NO_CHECKPOINT
    return str(error.value)


def test_without_a_usable_checkpoint_the_run_ends_and_does_not_begin_anew(tmp_path):
    run_ranks(save_steps, 1, str(tmp_path))
    for step in (1, 2):
        flip(tmp_path / f"step-{step:08d}" / "trainer.json")
    one, other = run_ranks(no_checkpoint, 2, str(tmp_path))
    assert one == other and "damaged" in one and "\n" not in one


def sizes_only(rank: int, world: int, folder: str) -> None:
    checkpoints = Checkpoints(Path(folder))
    assert checkpoints.latest(verify=False) == 2
    assert "wrong checksum" in (checkpoints.verify(checkpoints.path(2)) or "")
    assert checkpoints.verify(checkpoints.path(1)) is None


def newer(rank: int, world: int, folder: str) -> str:
    with pytest.raises(UserError) as error:
        Checkpoints(Path(folder)).latest()
    return str(error.value)


def test_a_checkpoint_of_a_newer_format_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("forge.checkpoint.manifest.FORMAT", 2)
    path = tmp_path / "step-00000001"
    path.mkdir()
    (path / MANIFEST).write_text(compose(1, 1, {}, {}))
    (message,) = run_ranks(newer, 1, str(tmp_path))
    assert "format 2" in message and names(tmp_path) == ["step-00000001"]


def test_contents_are_not_read_when_not_asked_for(tmp_path):
    run_ranks(save_steps, 1, str(tmp_path))
    flip(tmp_path / "step-00000002" / "trainer.json")
    run_ranks(sizes_only, 2, str(tmp_path))


class Bomb:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.target),)


def refused(rank: int, world: int, folder: str) -> str:
    with pytest.raises(UserError) as error:
        load(Path(folder), named(value_shards(rank, world, 0.0)))
    return str(error.value)


def test_an_index_that_would_run_code_is_refused(tmp_path):
    run_ranks(save_steps, 1, str(tmp_path), 1)
    path = tmp_path / "step-00000001"
    (path / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    (message,) = run_ranks(refused, 1, str(path))
    assert "mkdir" in message and not (tmp_path / "exploded").exists()


def test_an_index_that_cannot_be_read_ends_all_ranks_alike(tmp_path):
    run_ranks(save_steps, 1, str(tmp_path), 1)
    path = tmp_path / "step-00000001"
    cut_short(path / ".metadata")
    one, other = run_ranks(refused, 2, str(path))
    assert one == other and str(path) in one
    shutil.rmtree(path)
