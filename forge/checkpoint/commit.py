"""The commit protocol: a checkpoint appears complete or not at all, even if a process dies at any point.

    make a partial folder and check the room on the disk (if there is too little, remove old checkpoints early)
    -> every rank writes and syncs its tensors (DCP), then hashes its files
    -> rank 0 writes the other files and, last, the manifest, and syncs the folder
    -> rename to the final name, sync the parent folder
    -> prune old checkpoints

Before each arrow, all ranks agree that the previous stage succeeded on every rank.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta

from forge.checkpoint import folders
from forge.checkpoint.manifest import MANIFEST, compose, entry
from forge.checkpoint.tensors import ShardTensor
from forge.runtime.causes import Cause
from forge.runtime.distributed import (
    RanksFailed,
    cause_of,
    describe,
    gather_from_ranks,
    on_every_rank,
    on_first_rank,
)
from forge.runtime.fault import fault_point
from forge.runtime.files import replace_atomically, sync_folder

logger = logging.getLogger(__name__)
# An upper bound of the bytes of each rank's entries in the manifest.
RANK_BYTES = 1024


@dataclass(frozen=True)
class Contents:
    """The contents of the checkpoint of `step`.

    tensors: name -> this rank's tensor; every rank writes its own. layout: JSON for the manifest. files: relative path ->
    content. Rank 0 writes layout and files.
    """

    step: int
    layout: dict[str, Any]
    files: dict[str, bytes]
    tensors: dict[str, ShardTensor]
    # DCP buffers a whole file in memory until it is complete. Tensors computed lazily, while they are written, need a
    # file each.
    file_per_tensor: bool = False


@dataclass(frozen=True)
class Storage:
    """The operations of a commit that differ between shared and node-local storage (local.py).

    what: noun for messages, e.g. "local state". leads: True on a leading rank, which makes, prunes and removes the
    folders in `root`.

    claim(final): frees the final name; returns False if the step has a complete checkpoint. Called on leading ranks.
    check_room(sizes): raises if there is no room. sizes: for each rank, an upper bound of the bytes to write. Collective.
    fill(partial, final, contents): writes the folder `partial` and renames it to `final`. Collective.
    """

    what: str
    leads: bool
    claim: Callable[[Path], bool]
    check_room: Callable[[list[int]], object]
    fill: Callable[[Path, Path, Contents], object]


def write_checkpoint(
    root: Path,
    step: int,
    contents: Contents | Exception,
    keep_last: int,
    keep_every: int,
    group: dist.ProcessGroup | None = None,
) -> bool:
    """Write one checkpoint to storage shared by all ranks. Collective over `group`.

    Results and errors are those of `commit`.
    """

    def claim(final: Path) -> bool:
        if (final / MANIFEST).exists():
            return False
        if final.exists():
            message = "%s is not a complete checkpoint, because it has no %s: renaming it to .damaged-%s"
            logger.error(message, final, MANIFEST, final.name, extra=Cause.FALLBACK.mark)
            folders.set_aside(root, step, "damaged")
        return True

    def check_room(sizes: list[int]) -> None:
        on_first_rank("looking for room", lambda: make_room(root, sum(sizes), keep_last, keep_every), group)

    def fill(partial: Path, final: Path, contents: Contents) -> None:
        fill_folder(partial, final, contents, group)

    storage = Storage("checkpoint", dist.get_rank(group) == 0, claim, check_room, fill)
    return commit(root, step, contents, storage, keep_last, keep_every, group)


def commit(
    root: Path,
    step: int,
    contents: Contents | Exception,
    storage: Storage,
    keep_last: int,
    keep_every: int,
    group: dist.ProcessGroup | None,
) -> bool:
    """Write one checkpoint to `storage`, then prune old ones. Collective over `group`.

    Return False if the step already has a complete checkpoint, which is kept. If a rank fails, or passes an exception in
    place of `contents`, every rank raises RanksFailed. No partial checkpoint then remains on disk.
    """
    partial, final = root / f".partial-{folders.step_name(step)}", root / folders.step_name(step)

    def begin() -> int | None:
        """On leading ranks, make the partial folder.

        Return an upper bound of the bytes that this rank will write; None if the step already has a complete checkpoint.
        """
        if isinstance(contents, Exception):
            raise contents
        if storage.leads:
            root.mkdir(parents=True, exist_ok=True)
            if not storage.claim(final):
                return None
            folders.sweep(root)
            folders.start_partial(root, step)
        size = RANK_BYTES + sum(tensor.written_bytes for tensor in contents.tensors.values())
        return size + sum(map(len, contents.files.values())) if dist.get_rank(group) == 0 else size

    def remove() -> None:
        if storage.leads:
            shutil.rmtree(partial, ignore_errors=True)

    try:
        sizes = gather_from_ranks(f"preparing the {storage.what}", begin, group)
        assert isinstance(contents, Contents)
        if None in sizes:
            if storage.leads:
                logger.info("step %d has a complete %s already: not saved again", step, storage.what)
            return False
        storage.check_room([size or 0 for size in sizes])
        storage.fill(partial, final, contents)
    except RanksFailed:
        # Collective, because no rank may continue before the partial folder is gone and its space is free again.
        on_every_rank(f"removing the partial {storage.what}", remove, group)
        raise
    if storage.leads:
        try:
            folders.prune(root, keep_last, keep_every, step)
        # No exception is raised, because the checkpoint is complete and the other ranks have already continued.
        except Exception as error:
            message = "could not remove old checkpoints in %s: %s"
            logger.error(message, root, describe(error), extra=Cause.NOT_REMOVED.mark)
    return True


def fill_folder(
    partial: Path, final: Path, contents: Contents, group: dist.ProcessGroup | None = None
) -> None:
    """Fill the empty folder `partial`. Then rename it to `final`.

    Collective over `group`. Raises RanksFailed if a rank fails; the caller must then remove `partial`.
    """
    save_tensors(partial, contents, group)
    rank = dist.get_rank(group)

    def own_files() -> dict[str, dict[str, Any]]:
        """Read back and hash the files written by DCP on this rank, including DCP's index on rank 0."""
        names = [path.name for path in partial.glob(f"__{rank}_*.distcp")] + [".metadata"] * (rank == 0)
        return {name: entry(partial / name) for name in names}

    parts = gather_from_ranks("reading back what was written", own_files, group)
    on_first_rank("completing the checkpoint", lambda: _complete(partial, final, contents, parts), group)


def make_room(root: Path, needed: int, keep_last: int, keep_every: int) -> None:
    """Remove old checkpoints early if the disk has no room for a new checkpoint of `needed` bytes.

    The newest complete checkpoint always stays. Raises OSError if there is still too little room.
    """
    try:
        require_room(root, needed)
    except OSError:
        if keep_last == 0 or len(folders.steps(root)) < 2:
            raise
        message = "too little room in %s for the next checkpoint: removing old ones first"
        logger.warning(message, root, extra=Cause.DISK_FULL.mark)
        folders.prune(root, max(keep_last - 1, 1), keep_every)
        require_room(root, needed)


def require_room(root: Path, needed: int) -> None:
    """Raise OSError if the disk has no room for a checkpoint of `needed` bytes.

    The check comes before writing, because a full disk would also stop metrics and other runs. A quota cannot be checked:
    only a write that exceeds it fails.
    """
    free = shutil.disk_usage(root).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the checkpoint needs {needed / 1e9:.3g} GB, but only {free / 1e9:.3g} GB are free in {root}",
        )


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, with a fault-injection point. Does not store the folder's absolute path in the checkpoint."""

    def __init__(self, folder: Path, step: int, file_per_tensor: bool):
        # With a copy-ahead other than 0, DCP opens CUDA streams in this thread, although all tensors are on the CPU.
        super().__init__(
            folder, thread_count=1, per_thread_copy_ahead=0, single_file_per_rank=not file_per_tensor
        )
        self._step = step

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:
            # After a failed write, PyTorch's archive writer raises a RuntimeError about its file position. The OSError
            # with the cause is only the context of this error.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        fault_point("save.between_shards", self._step)
        return written

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def save_tensors(partial: Path, contents: Contents, group: dist.ProcessGroup | None) -> None:
    """Write this rank's tensors to `partial`. The first rank also writes DCP's index.

    Collective over `group`. Raises RanksFailed if a rank fails.
    """
    try:
        dcp.save(
            dict(contents.tensors),
            storage_writer=_Writer(partial, contents.step, contents.file_per_tensor),
            planner=DefaultSavePlanner(flatten_sharded_tensors=False),
            process_group=group,
        )
    except CheckpointException as error:  # DCP raises it on every rank
        rank, (cause, _) = next(iter(error.failures.items()))
        problem = f"writing tensors failed on rank {rank}: {describe(cause)}"
        raise RanksFailed(problem, cause_of(cause)) from None


def _complete(partial: Path, final: Path, contents: Contents, parts: list[dict[str, dict[str, Any]]]) -> None:
    """Write the other files and the manifest, and rename `partial` to `final`. Call on rank 0."""
    files = {name: described for part in parts for name, described in part.items()}
    for name, content in contents.files.items():
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(path, content)
        files[name] = entry(path)
    # DCP syncs files, but not their folder.
    for folder in {(partial / name).parent for name in files}:
        sync_folder(folder)
    # The manifest makes the folder complete, so all other files must be on disk before it.
    fault_point("save.before_manifest", contents.step)
    manifest = compose(contents.step, len(parts), contents.layout, files)
    replace_atomically(partial / MANIFEST, manifest.encode())
    fault_point("save.before_rename", contents.step)
    partial.rename(final)
    sync_folder(final.parent)
