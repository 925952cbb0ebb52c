"""Tamper with checkpoints as an attacker who knows the format, and update the manifest."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from forge.checkpoint.manifest import MANIFEST, compose, entry, read_manifest


def sign(path: Path, names: Iterable[str] | None = None) -> None:
    """Update the manifest to match the files. names: files to list; None: the files listed now."""
    manifest = read_manifest(path)
    files = {name: entry(path / name) for name in (manifest["files"] if names is None else names)}
    text = compose(manifest["step"], manifest["world_size"], manifest["layout"], files)
    (path / MANIFEST).write_text(text)


def edit_index(path: Path, edit: Callable[[Any], None]) -> None:
    """Change DCP's index in place. The manifest does not match the index until `sign`."""
    index = pickle.loads((path / ".metadata").read_bytes())
    edit(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))
