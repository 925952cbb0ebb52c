"""Folders that appear only when complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.runtime.errors import FAILED, UserError
from forge.runtime.files import folder_beside
from forge.tools.hf.folder import new_folder


def test_two_processes_write_beside_one_output_and_remove_only_their_own_folders(tmp_path: Path) -> None:
    users = tmp_path / ".partial-model"
    users.mkdir()
    output = tmp_path / "model"
    with folder_beside(output) as first, folder_beside(output) as second:
        assert first != second
        (first / "file").touch()
        first.rename(output)
        (second / "file").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-model", "model"]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "model", 0) as partial:
        (partial / "file").touch()
        raise ZeroDivisionError
    with pytest.raises(UserError, match="are free there") as caught, new_folder(tmp_path / "model", 1 << 60):
        pass
    assert caught.value.exit_code == FAILED and not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="cannot be written: Not a directory"),
        new_folder(tmp_path / "file" / "model", 0),
    ):
        pass
