"""Private folders, accessible only to this user: for the block cache, and for node-local states.

Their usual locations, /tmp and /dev/shm, are open to every user of the node. Another user could make such a folder
first, and put links or blocks into it. forge therefore uses a folder only if this user owns it, it is a real directory of
mode 0700, and it has forge's marker file. Inside, forge removes only real directories with names made by forge.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from forge.runtime.errors import UserError

MARKER = ".forge-private"
_TEXT = b"forge keeps temporary data here and removes it. Do not put other files here.\n"


class PrivateFolder:
    """The private folder `path`, made if it does not exist. Several processes may make it at the same time.

    An empty folder of this user gets mode 0700 and a marker file. A folder without a marker gets both, too, if
    `adopts(path)` recognises files of an earlier forge version, which wrote no markers. key: the configuration key of the
    folder, for messages.
    Raises UserError if `path` is a link or a file, belongs to another user, is writable by other users, or cannot be
    used. Also raises UserError if a marked folder is readable by other users, or if an unmarked folder has other files.
    """

    def __init__(self, path: Path, key: str, adopts: Callable[[Path], bool] = lambda path: False):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _make(path)
            problem = _problem(path, key, adopts)
        except OSError as error:
            problem = f"cannot be used: {error.strerror}; set {key} to a folder that you can write to"
        if problem:
            raise UserError(f"{key}: {path} {problem}")

    @classmethod
    def existing(cls, path: Path) -> PrivateFolder | None:
        """Return the existing private folder `path`, or None. Makes no folder."""
        try:
            return cls(path, "") if os.path.lexists(path / MARKER) else None
        except UserError:
            return None

    def make(self, *names: str) -> Path:
        """Make and return the directory `path`/names[0]/names[1]/... below the private folder.

        Raises OSError if one of these directories is a link or a file.
        """
        made = self.path
        for name in names:
            made /= name
            _make(made)
            if not is_directory(made):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(made))
        return made

    def remove(self, names: re.Pattern[str], *within: str, keep: str = "") -> None:
        """Remove the directories below `path`/within[0]/within[1]/... whose names match `names`, except `keep`.

        Links are neither followed nor removed. Failures to remove are ignored.
        """
        folder = self.path
        for name in within:
            folder /= name
            if not is_directory(folder):
                return
        for name in os.listdir(folder):
            if name != keep and names.fullmatch(name) and is_directory(folder / name):
                shutil.rmtree(folder / name, ignore_errors=True)


def is_directory(path: Path) -> bool:
    """Return whether `path` is a real directory, not a link."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _make(folder: Path) -> None:
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)


def _problem(folder: Path, key: str, adopts: Callable[[Path], bool]) -> str | None:
    """Return the reason why the existing `folder` cannot be private, with a remedy; None if it can.

    Adds the marker to a folder that may become private.
    """
    is_marked = os.path.lexists(
        folder / MARKER
    )  # read before the mode, because a racing process sets the mode before it adds the marker
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        return f"is a link or a file; set {key} to a directory"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}; set {key} to a folder that belongs to you"
    if found.st_mode & 0o022 or (is_marked and found.st_mode & 0o077):
        return (
            f"is open to other users; if nobody else has changed it: chmod 700 {folder}; otherwise remove it"
        )
    if is_marked:
        return None
    names = os.listdir(folder)
    # A racing process adds the marker before any other file.
    if names and not adopts(folder) and not os.path.lexists(folder / MARKER):
        return (
            f"holds files that forge did not make, e.g. {min(names)}; set {key} to an empty or a new folder"
        )
    os.chmod(folder, 0o700)
    if os.lstat(folder).st_mode & 0o077:
        return f"does not keep its mode 0700; set {key} to a folder on a local file system"
    with suppress(FileExistsError):
        marker = os.open(folder / MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(marker, _TEXT)
        os.close(marker)
    return None
