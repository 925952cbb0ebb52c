"""forge detects, names and skips damage; nothing in a checkpoint can run code."""

import enum
import errno
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forge.checkpoint import Checkpoints, load
from forge.checkpoint.loading import TensorReader
from forge.checkpoint.manifest import MANIFEST, Damaged, compose, entry, read_manifest
from forge.runtime.errors import NO_CHECKPOINT, UserError
from tests.support.checkpoints import loaded_value, named, names, save_value, value_shards
from tests.support.harness import run_ranks
from tests.support.strangers import sign


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


FILES = ["__1_0.distcp", "trainer.json", ".metadata", "config.toml", MANIFEST]
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (cut_short, "bytes instead of"),
    "missing": (os.unlink, "cannot be read: No such file"),
    "flipped": (flip, "wrong checksum"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return a folder with two checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_steps, 2, str(folder))
    return folder


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_s1_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(name, how, saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    damage, reason = DAMAGE[how]
    damage(folder / "step-00000002" / name)
    one, other = run_ranks(find_and_save, 2, str(folder))
    assert one == other and len(one) == 1 and name in one[0]
    assert reason in one[0] or (name == MANIFEST and how != "missing")
    assert names(folder) == [".damaged-step-00000002", "step-00000001", "step-00000002"]


def find_after_a_new_history(rank: int, world: int, folder: str) -> tuple[list[str], int | None]:
    checkpoints = Checkpoints(Path(folder))
    assert checkpoints.latest() == 1
    aside = checkpoints.set_aside_after(-1, damaged=True)
    return aside, checkpoints.latest()


def test_damaged_checkpoints_of_an_earlier_history_do_not_stop_a_new_one(saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    (folder / "step-00000002" / MANIFEST).unlink()
    aside = [".aside-step-00000001", ".aside-step-00000002"]
    assert run_ranks(find_after_a_new_history, 2, str(folder)) == [(aside, None)] * 2
    assert names(folder) == aside


@pytest.mark.long
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


def test_a_manifest_may_not_name_files_outside_its_folder(tmp_path):
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


@pytest.mark.parametrize("damage, name", [(flip, "trainer.json"), (os.unlink, MANIFEST)])
def test_s1_without_a_usable_checkpoint_the_run_ends_and_does_not_start_over(damage, name, saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    for step in (1, 2):
        damage(folder / f"step-{step:08d}" / name)
    one, other = run_ranks(no_checkpoint, 2, str(folder))
    assert one == other and "damaged" in one and "\n" not in one


def out_of_reach(rank: int, world: int, folder: str, name: str, function: str) -> str:
    real = getattr(Path, function)

    def refuse(self, *arguments, **named):
        if self.name == name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(self, *arguments, **named)

    setattr(Path, function, refuse)
    with pytest.raises(UserError) as error:
        Checkpoints(Path(folder)).latest()
    assert error.value.exit_code == NO_CHECKPOINT
    return str(error.value)


@pytest.mark.parametrize(("name", "function"), [(MANIFEST, "read_text"), ("__1_0.distcp", "open")])
def test_s1_an_unreachable_checkpoint_is_not_called_damaged(name, function, saved, tmp_path):
    """A briefly missing mount must not cost all checkpoints."""
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    before = names(folder)
    one, other = run_ranks(out_of_reach, 2, str(folder), name, function)
    assert one == other and f"{name} cannot be read: Stale file handle" in one and "can be used" in one
    assert names(folder) == before


def sizes_only(rank: int, world: int, folder: str) -> None:
    checkpoints = Checkpoints(Path(folder))
    assert checkpoints.latest(verify=False) == 2
    assert "wrong checksum" in (checkpoints.verify(checkpoints.path(2)) or "")
    assert checkpoints.verify(checkpoints.path(1)) is None
    assert "wrong checksum" in (checkpoints.verify(checkpoints.path(1).with_name("state"), False) or "")


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


def test_without_full_verification_all_files_but_tensors_are_verified(saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    shutil.copytree(folder / "step-00000001", folder / "state")
    flip(folder / "state" / "trainer.json")
    flip(folder / "step-00000002" / "__0_0.distcp")
    run_ranks(sizes_only, 2, str(folder))


class Bomb:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.target),)


def refused(rank: int, world: int, folder: str) -> str:
    with pytest.raises(UserError) as error:
        load(Path(folder), named(value_shards(rank, world, 0.0)))
    return str(error.value)


def test_an_index_is_opened_only_after_its_checksum_is_verified(saved, tmp_path):
    path = Path(shutil.copytree(saved / "step-00000001", tmp_path / "checkpoint"))
    content = (path / ".metadata").read_bytes()
    # An equal pickle with another checksum.
    (path / ".metadata").write_bytes(content + b"\0")
    assert isinstance(pickle.loads(content + b"\0"), type(pickle.loads(content)))
    one, other = run_ranks(refused, 2, str(path))
    assert one == other and ".metadata has a wrong checksum" in one and str(path) in one
    with pytest.raises(Damaged):
        TensorReader(path).tensors()


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_index_with_code_is_refused_even_with_a_correct_checksum(wrapped, saved, tmp_path):
    path = Path(shutil.copytree(saved / "step-00000001", tmp_path / "checkpoint"))
    bomb = Bomb(tmp_path / "exploded")
    if wrapped:
        index = pickle.loads((path / ".metadata").read_bytes())
        index.planner_data = [bomb]
        bomb = index
    (path / ".metadata").write_bytes(pickle.dumps(bomb))
    sign(path)
    (message,) = run_ranks(refused, 1, str(path))
    assert "mkdir" in message and not (tmp_path / "exploded").exists()


class PicklerByName(pickle.Pickler):
    """Pickle enum members like Python 3.11.0 to 3.11.3, e.g. Debian 12's."""

    def reducer_override(self, value: object) -> object:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_an_index_written_by_an_early_python_311_is_read(saved, tmp_path):
    path = Path(shutil.copytree(saved / "step-00000001", tmp_path / "checkpoint"))
    index = pickle.loads((path / ".metadata").read_bytes())
    with open(path / ".metadata", "wb") as file:
        PicklerByName(file).dump(index)
    assert b"getattr" in (path / ".metadata").read_bytes()
    sign(path)
    assert TensorReader(path).tensors() == TensorReader(saved / "step-00000001").tensors()


class Attribute:
    def __reduce__(self) -> tuple:
        return getattr, (type(Path()), "unlink")


def test_an_index_with_an_attribute_of_another_module_is_refused(saved, tmp_path):
    path = Path(shutil.copytree(saved / "step-00000001", tmp_path / "checkpoint"))
    index = pickle.loads((path / ".metadata").read_bytes())
    index.planner_data = [Attribute()]
    (path / ".metadata").write_bytes(pickle.dumps(index))
    sign(path)
    (message,) = run_ranks(refused, 1, str(path))
    assert "the attribute 'unlink'" in message


def test_a_tensor_file_with_code_is_refused_even_with_a_correct_checksum(saved, tmp_path):
    """A shard file is a sequence of torch.save archives. The test replaces one with another object's archive."""
    path = Path(shutil.copytree(saved / "step-00000001", tmp_path / "checkpoint"))
    index = pickle.loads((path / ".metadata").read_bytes())
    for place in index.storage_data.values():
        torch.save(Bomb(tmp_path / "exploded"), path / place.relative_path)
        place.offset, place.length = 0, (path / place.relative_path).stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(index))
    sign(path)
    (message,) = run_ranks(refused, 1, str(path))
    assert "mkdir" in message and not (tmp_path / "exploded").exists()
