"""Private folders: creation, checks, and removal of forge's own files only."""

from __future__ import annotations

import os
import re
import stat
import threading
from pathlib import Path

import pytest

from forge.runtime.errors import UserError
from forge.runtime.private import MARKER, PrivateFolder

KEY = "data.cache_dir"


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        PrivateFolder(path, KEY)
    assert str(error.value).startswith(f"{KEY}: {path} ")
    return str(error.value)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_and_empty_folders_become_private_and_are_reused(tmp_path) -> None:
    (tmp_path / "empty").mkdir(mode=0o755)
    for path in (tmp_path / "empty", tmp_path / "a" / "new"):
        for _ in range(2):
            PrivateFolder(path, KEY)
            assert mode(path) == 0o700 and os.listdir(path) == [MARKER]
    assert PrivateFolder.existing(tmp_path / "empty") and not PrivateFolder.existing(tmp_path / "a")


def test_processes_racing_to_create_a_folder_all_get_it(tmp_path) -> None:
    for number in range(50):
        path, together, failed = tmp_path / str(number), threading.Barrier(8), []

        def make(path=path, together=together, failed=failed) -> None:
            together.wait()
            try:
                PrivateFolder(path, KEY).make("run", "history")
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=make) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


def test_a_folder_of_other_files_is_refused_and_unchanged(tmp_path) -> None:
    (tmp_path / "0042").mkdir()
    tmp_path.chmod(0o755)
    assert "holds files that forge did not make, e.g. 0042; set data.cache_dir to an empty" in refusal(
        tmp_path
    )
    assert os.listdir(tmp_path) == ["0042"] and mode(tmp_path) == 0o755


def test_a_link_and_a_file_are_refused(tmp_path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "home")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        assert "is a link or a file" in refusal(tmp_path / name)
    assert not os.listdir(tmp_path / "home")


def test_a_folder_writable_by_other_users_is_refused_even_with_a_marker(tmp_path) -> None:
    path = tmp_path / "cache"
    PrivateFolder(path, KEY)
    for open_to_others in (0o777, 0o770, 0o750):
        path.chmod(open_to_others)
        assert f"chmod 700 {path}" in refusal(path)
        assert PrivateFolder.existing(path) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path) -> None:
    path = tmp_path / "cache"
    PrivateFolder(path, KEY)
    os.chown(path, 65534, 65534)
    assert "belongs to user 65534; set data.cache_dir to a folder that belongs to you" in refusal(path)


def test_an_unmarked_folder_of_an_earlier_forge_is_adopted_unless_others_could_write_to_it(tmp_path) -> None:
    (tmp_path / "0042").mkdir()
    tmp_path.chmod(0o775)
    with pytest.raises(UserError, match="is open to other users"):
        PrivateFolder(tmp_path, KEY, adopts=lambda path: True)
    tmp_path.chmod(0o755)
    PrivateFolder(tmp_path, KEY, adopts=lambda path: (path / "0042").is_dir())
    assert mode(tmp_path) == 0o700 and (tmp_path / MARKER).is_file() and (tmp_path / "0042").is_dir()


def test_only_directories_with_forge_s_names_are_removed_and_links_are_not_followed(tmp_path) -> None:
    folder = PrivateFolder(tmp_path / "place", KEY)
    home = tmp_path / "home"
    for path in (home / "0003", folder.make("0001"), folder.make("0002"), folder.make("2019-thesis")):
        path.mkdir(parents=True, exist_ok=True)
        (path / "file").touch()
    (folder.path / "0004").touch()
    (folder.path / "0005").symlink_to(home)
    (folder.path / "0001" / "link").symlink_to(home)
    folder.remove(re.compile(r"\d{4}"), keep="0002")
    assert sorted(os.listdir(folder.path)) == [MARKER, "0002", "0004", "0005", "2019-thesis"]
    folder.remove(re.compile(r"\d{4}"), "0005")
    assert (home / "0003" / "file").exists()
    with pytest.raises(NotADirectoryError):
        folder.make("0005", "inner")
    assert not (home / "inner").exists()
