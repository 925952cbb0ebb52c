"""What both directions share: one process as a team, a folder that appears whole or not at all, progress."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from forge.errors import FAILED, UserError

Tell: TypeAlias = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all)"""


def silent(what: str, done: int, total: int) -> None:
    """Tells nobody."""


@contextmanager
def appearing(output: Path, needed: int) -> Iterator[Path]:
    """An empty folder beside `output` to be filled with `needed` bytes and renamed; removed, whatever stops the work.

    Raises UserError if there is something at `output` (exit 2), or no room for it (exit 1).
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output}: is there already; choose another folder or remove it")
    partial = output.absolute().with_name(f".partial-{output.absolute().name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}") from None
    try:
        free = shutil.disk_usage(partial).free
        if free < needed:
            room = f"{free / 1e9:.3g} GB are free there"
            raise UserError(f"{output}: takes {needed / 1e9:.3g} GB, and {room}", FAILED)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
