"""The output folder of prepare_data: its lock, files that are not of forge, and the removal of parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

from forge.observe.json_lines import read_object
from forge.runtime.errors import UserError
from forge.runtime.files import lock
from forge.tools.prepare.part import TRAIN, VALIDATION

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
    known = _of_interrupted_run(parts)
    for folder, pattern in product(folders, _names(metadata)):
        if (folder, pattern) not in known and (found := sorted(folder.glob(pattern))):
            raise UserError(
                f"{found[0]}: would be overwritten, and belongs to no dataset or interrupted run; choose another --output, "
                "or remove this file"
            )


def _of_interrupted_run(parts: Path) -> set[tuple[Path, str]]:
    """Return (folder, pattern of names) of the files that the interrupted run of `parts` writes; empty without such a run."""
    options = read_object(parts / "plan.json").get("options")
    if options is None:
        return set()
    splits = (TRAIN, VALIDATION) if options.get("holdout") else ("",)
    metadata = bool((options.get("quality") or {}).get("metadata"))
    return set(product((parts.parent / split for split in splits), _names(metadata)))


def _names(metadata: bool) -> list[str]:
    """Return patterns of the names of a dataset's files, except dataset.json."""
    return [*_SHARDS, *([METADATA] if metadata else [])]


def remove_parts(parts: Path) -> None:
    """Remove the files that this program writes to `parts`, and then the folder if it is empty."""
    with suppress(OSError):
        for pattern in ("part-*", ".part-*", "*plan.json*", *_LOCKS):
            for path in parts.glob(pattern):
                path.unlink()
        parts.rmdir()
