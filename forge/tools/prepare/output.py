"""The output folder of prepare_data: its lock, files that are not of forge, and the removal of parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from forge.runtime.errors import UserError
from forge.runtime.files import lock

METADATA = "metadata.jsonl"
_LOCKS = ("lock", "plan.lock")
_SHARDS = ("tokens-*.bin", "documents-*.bin", "blocks-*.bin")


@contextmanager
def locked(parts: Path, shared: bool = False) -> Iterator[None]:
    """Lock the output folder in the body. shared: allow other processes with `shared` to lock the folder at the same time.

    The kernel releases the lock when the process ends. Raises UserError if another process has the lock, or if the folder is
    not writable.
    """
    try:
        parts.mkdir(parents=True, exist_ok=True)
        file = open(parts / "lock", "w")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"--output {parts.parent}: cannot be written: {error.strerror}") from None
    with file:
        try:
            if not lock(file.fileno(), shared=shared):
                print(
                    f"warning: {parts.parent}: its file system has no locks; a second prepare_data there would go unnoticed",
                    file=sys.stderr,
                )
        except BlockingIOError:
            raise UserError(f"--output {parts.parent}: another prepare_data is writing to it") from None
        except OSError as error:
            raise UserError(f"--output {parts.parent}: cannot be locked: {error.strerror}") from None
        yield


def refuse_other_files(folders: Sequence[Path], parts: Path, *, metadata: bool) -> None:
    """Raise UserError if a folder for a dataset has files with names of a dataset that prepare_data did not write.

    parts: the folder of an interrupted run's parts. metadata: the dataset will have metadata.
    """
    if (parts / "plan.json").exists():
        return  # files of an interrupted run
    for folder in folders:
        found = [path for name in (*_SHARDS, *([METADATA] if metadata else [])) for path in folder.glob(name)]
        if found:
            raise UserError(
                f"{found[0]}: would be overwritten, and belongs to no dataset or interrupted run; choose another --output, "
                "or remove this file"
            )


def remove_parts(parts: Path) -> None:
    """Remove the files that this program writes to `parts`, and then the folder if it is empty."""
    with suppress(OSError):
        for pattern in ("part-*", ".part-*", "*plan.json*", *_LOCKS):
            for path in parts.glob(pattern):
                path.unlink()
        parts.rmdir()
