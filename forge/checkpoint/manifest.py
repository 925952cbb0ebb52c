"""manifest.json, with the size and SHA-256 of every file of a complete checkpoint, and the check for damage.

A folder is a complete checkpoint exactly when it has a manifest, which is written last. The manifest contains its own
digest and has only one valid byte sequence. A flipped bit in the manifest is therefore found, too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch.distributed as dist

from forge.runtime import compat
from forge.runtime.distributed import gather_from_ranks, on_first_rank
from forge.runtime.errors import NO_CHECKPOINT, UserError
from forge.runtime.files import read_json

MANIFEST = "manifest.json"
FORMAT = 1
_BLOCK, _READ_AHEAD = 1 << 20, 1 << 25
# Errors that prove a missing or broken file. Other errors come from the file system or from permissions.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO}


class Damaged(Exception):
    """A checkpoint differs from its saved content. The message names the file and the problem."""


def find_damage(
    folder: Path,
    *,
    contents: bool = True,
    group: dist.ProcessGroup | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> str | None:
    """Return a description of the damage of the checkpoint in `folder`; None if it is undamaged. Collective over `group`.

    First, sizes are compared. Then the ranks divide the files among themselves and hash them. Without `contents`,
    tensor files are not hashed. report(done, total): called with the number of bytes hashed by this rank so far, and
    its total. Raises UserError (exit 77) for a manifest in another format version. Raises RanksFailed if files cannot
    be read for a reason other than damage, e.g. an unmounted file system.
    """
    files, problem = on_first_rank("reading the manifest", lambda: _read_files(folder), group)
    if problem is not None:
        return problem
    # Distributed by size, so no rank gets all large files.
    names = [name for name in files if contents or not name.endswith(".distcp")]
    names.sort(key=lambda name: (-files[name]["size"], name))
    share = {name: files[name] for name in names[dist.get_rank(group) :: dist.get_world_size(group)]}
    found = gather_from_ranks("hashing the checkpoint", lambda: find_changed(folder, share, report), group)
    problems = [problem for of_rank in found for problem in of_rank]
    more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}" if problems else None


def _read_files(folder: Path) -> tuple[dict[str, Any], str | None]:
    """Check the manifest and every file's size. Return the manifest's entries, and the damage (None: undamaged)."""
    try:
        manifest = read_manifest(folder)
        if manifest["format"] != FORMAT:
            message = f"checkpoint {folder} has format {manifest['format']}; this forge reads {FORMAT}"
            raise UserError(message, NO_CHECKPOINT)
        for name, expected in manifest["files"].items():
            with _reading(name):
                status = (folder / name).stat()
            if not stat.S_ISREG(status.st_mode):
                raise Damaged(f"{name} is not a regular file")
            if status.st_size != expected["size"]:
                raise Damaged(f"{name} has {status.st_size} bytes instead of {expected['size']}")
        # Also check files not in the manifest: a pipe or a device would block its reader.
        for root, _, names in os.walk(folder):
            for path in (Path(root, name) for name in names):
                name = path.relative_to(folder).as_posix()
                if name not in manifest["files"] and path.exists() and not path.is_file():
                    raise Damaged(f"{name} is not a regular file")
    except Damaged as error:
        return {}, str(error)
    return manifest["files"], None


def find_changed(
    folder: Path,
    files: dict[str, dict[str, Any]],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Hash `files`, a dict from relative path to `entry`. Return one sentence for each damaged or missing file.

    Not collective. Raises OSError if a file cannot be read for a reason other than damage. report: as in `find_damage`.
    """
    problems, done, total = [], 0, sum(expected["size"] for expected in files.values())
    for name, expected in files.items():
        try:
            with _reading(name):
                actual = entry(folder / name)
            if actual != expected:
                raise Damaged(f"{name} has a wrong checksum")
        except Damaged as error:
            problems.append(str(error))
        done += expected["size"]
        report(done, total)
    return problems


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn an OSError of the body into Damaged if it proves damage of the file `name`.

    Any other OSError is raised again with `name` in its message.
    """
    try:
        yield
    except OSError as error:
        message = f"{name} cannot be read: {error.strerror}"
        raise Damaged(message) if error.errno in _DAMAGE else OSError(error.errno, message) from error


def entry(path: Path) -> dict[str, Any]:
    """Return the manifest's entry for one file: its size in bytes and its SHA-256.

    The kernel reads ahead while this process hashes, so reading and hashing overlap.
    """
    digest, size, asked = hashlib.sha256(), 0, 0
    buffer = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as stream:
        while True:
            if asked <= size + _READ_AHEAD // 2 and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), asked, _READ_AHEAD, os.POSIX_FADV_WILLNEED)
                asked += _READ_AHEAD
            count = stream.readinto(buffer)
            if not count:
                return {"size": size, "sha256": digest.hexdigest()}
            digest.update(buffer[:count])
            size += count


def compose(step: int, world_size: int, layout: dict[str, Any], files: dict[str, dict[str, Any]]) -> str:
    """Return the manifest's text. files: relative path -> `entry`."""
    return _spell(
        {
            "format": FORMAT,
            "step": step,
            "world_size": world_size,
            "layout": layout,
            "versions": compat.versions(),
            "files": files,
        }
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read, check and return the manifest of the checkpoint in `folder`. Not collective.

    Raises Damaged if the manifest has changed since it was written, or names a file outside the folder.
    """
    try:
        with _reading(MANIFEST):
            if (folder / MANIFEST).exists() and not (folder / MANIFEST).is_file():
                raise Damaged(f"{MANIFEST} is not a regular file")
            text = (folder / MANIFEST).read_text("utf-8")
        manifest = read_json(text)
        body = {key: value for key, value in manifest.items() if key != "digest"}
    except (ValueError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from error
    if text != _spell(body):
        raise Damaged(f"{MANIFEST} does not match its own digest")
    for name in manifest.get("files", {}):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise Damaged(f"{MANIFEST} names a file outside the checkpoint: {name}")
    return manifest


def read_digest(path: Path) -> str | None:
    """Return the digest of the checkpoint's manifest, which identifies the checkpoint. Not collective.

    None: the checkpoint has no valid manifest.
    """
    try:
        return str(read_manifest(path)["digest"])
    except (Damaged, OSError):
        return None


def _spell(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True)
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps(body | {"digest": digest}, sort_keys=True, indent=1) + "\n"
