"""manifest.json: what a complete checkpoint holds, with every file's size and SHA-256: damage is found.

A folder is a complete checkpoint exactly when it has a manifest, which is written last. The manifest carries
a digest of itself and has one spelling only, so a flipped bit in any byte of it is found as well.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

import torch

MANIFEST = "manifest.json"
FORMAT = 1
_BLOCK, _AHEAD = 1 << 20, 1 << 25


# Of a file that is gone or broken. Any other error is its file system's, or of who may read it, and says nothing of the file.
_OF_FILES = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO}


class Damaged(Exception):
    """A checkpoint is not what was saved; the message names the file and what is wrong with it."""


class Unreachable(Damaged):
    """Nobody can say whether a checkpoint is what was saved: its files cannot be read now, as on a mount that is away."""


def _unreadable(name: str, error: OSError) -> Damaged:
    kind = Damaged if error.errno in _OF_FILES else Unreachable
    return kind(f"{name} cannot be read: {error.strerror}")


def entry(path: Path) -> dict[str, Any]:
    """What the manifest says of one file: size in bytes and SHA-256.

    The system is asked to read ahead while we hash, so the slower of the two counts and not their sum.
    """
    digest, size, asked = hashlib.sha256(), 0, 0
    buffer = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as stream:
        while True:
            if asked <= size + _AHEAD // 2 and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), asked, _AHEAD, os.POSIX_FADV_WILLNEED)
                asked += _AHEAD
            count = stream.readinto(buffer)
            if not count:
                return {"size": size, "sha256": digest.hexdigest()}
            digest.update(buffer[:count])
            size += count


def compose(step: int, world_size: int, layout: dict, files: dict[str, dict[str, Any]]) -> str:
    """The manifest's text; `files` maps relative paths to `entry`s."""
    return _spell(
        {
            "format": FORMAT,
            "step": step,
            "world_size": world_size,
            "layout": layout,
            "versions": _versions(),
            "files": files,
        }
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, as written; raises `Damaged`."""
    try:
        text = (folder / MANIFEST).read_text("utf-8")
        manifest = json.loads(text)
        body = {key: value for key, value in manifest.items() if key != "digest"}
    except OSError as error:
        raise _unreadable(MANIFEST, error) from error
    except (ValueError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from error
    if text != _spell(body):
        raise Damaged(f"{MANIFEST} does not match its own digest")
    for name in manifest.get("files", {}):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise Damaged(f"{MANIFEST} names a file outside the checkpoint: {name}")
    return manifest


def check_content(folder: Path, name: str, content: bytes) -> None:
    """Raises `Damaged` unless `content` is what was saved as the file `name` of the checkpoint."""
    expected = read_manifest(folder)["files"].get(name, {})
    if hashlib.sha256(content).hexdigest() != expected.get("sha256"):
        raise Damaged(f"{name} has a wrong checksum")


def is_tensors(name: str) -> bool:
    """True for the files that make up nearly all of a checkpoint."""
    return name.endswith(".distcp")


def check_sizes(folder: Path, manifest: dict[str, Any]) -> None:
    """Raises `Damaged` for the first file that is missing or has another size: cheap, finds most damage."""
    for name, expected in manifest["files"].items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise _unreadable(name, error) from error
        if size != expected["size"]:
            raise Damaged(f"{name} has {size} bytes instead of {expected['size']}")


def find_changed(folder: Path, files: dict[str, dict[str, Any]]) -> list[str]:
    """One sentence for each of these files whose content is not what was saved; reads them whole. Raises `Unreachable`."""
    problems = []
    for name, expected in files.items():
        try:
            actual = entry(folder / name)
        except OSError as error:
            problem = _unreadable(name, error)
            if isinstance(problem, Unreachable):
                raise problem from error
            problems.append(str(problem))
            continue
        if actual != expected:
            problems.append(f"{name} has a wrong checksum")
    return problems


def share(files: dict[str, dict[str, Any]], rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    """The part of `files` that one rank hashes, dealt out by size: no rank gets all the large ones."""
    by_size = sorted(files, key=lambda name: (-files[name]["size"], name))
    return {name: files[name] for name in by_size[rank::ranks]}


def _spell(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True)
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps(body | {"digest": digest}, sort_keys=True, indent=1) + "\n"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("forge", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree
            continue
    return found
