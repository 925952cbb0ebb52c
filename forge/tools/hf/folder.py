"""Common parts of import and export: result, progress, and a new folder that appears only when complete."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

from forge.runtime.errors import FAILED, UserError
from forge.runtime.files import folder_beside, leftovers

ReportProgress: TypeAlias = Callable[[str, int, int], None]
"""(current activity, bytes done, bytes in total)"""


class Conversion(NamedTuple):
    """The result of a conversion. architecture: class of transformers. with_tokenizer: True if the result has a tokenizer."""

    architecture: str
    with_tokenizer: bool


def no_progress(activity: str, done: int, total: int) -> None:
    """Report nothing."""


def refuse_existing(output: Path) -> None:
    """Raise UserError if `output` exists and is not an empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output}: exists already; choose another folder, or remove this one")


@contextmanager
def new_folder(output: Path, needed: int) -> Iterator[Path]:
    """Yield an empty temporary folder beside `output`. The caller fills it and renames it to `output`.

    At the end, remove the temporary folder unless it was renamed. needed: required free space in bytes. Raises UserError if
    `output` exists and is not empty or cannot be written (exit 2), or if the file system has too little space (exit 1).
    """
    refuse_existing(output)
    with ExitStack() as stack:
        try:
            partial = stack.enter_context(folder_beside(output))
        except OSError as error:
            raise UserError(f"{output}: cannot be written: {error.strerror}") from None
        free = shutil.disk_usage(partial).free
        if free < needed:
            sizes = f"needs {needed / 1e9:.3g} GB, but only {free / 1e9:.3g} GB are free there"
            others = [str(path) for path in leftovers(output) if path != partial]
            remedy = f"; a killed process may have left {', '.join(others)}" if others else ""
            raise UserError(f"{output}: {sizes}{remedy}", FAILED)
        yield partial
