"""Replacing a file so that a reader, even after a crash, finds the old content or the new."""

from __future__ import annotations

import os
from pathlib import Path


def replace_atomically(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write `content` beside `path`, sync it and rename it over `path`. On OSError `path` is as it was.

    Without `sync` it takes no time, and a crash of the machine, though not one of the process, may leave an empty file.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put a rename within `folder` on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
