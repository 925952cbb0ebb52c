"""The protocol that makes a checkpoint appear whole or not at all.

partial folder, room for all of it -> every rank writes and syncs its tensors (DCP) and hashes them -> rank 0
adds the other files and, last, the manifest -> sync -> rename to the final name -> sync -> prune. Before each
arrow all ranks agree that it went well.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
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
from forge.distributed import RanksFailed, describe, gather_from_ranks, on_first_rank
from forge.fault import fault_point
from forge.files import replace_atomically, sync_folder

logger = logging.getLogger(__name__)
TRAINER = "trainer.json"
# What the manifest takes for a rank, at most.
RANK_BYTES = 1024


@dataclass(frozen=True)
class Contents:
    """What goes into the checkpoint of `step`; `tensors` are this rank's own, the rest counts on rank 0."""

    step: int
    layout: dict[str, Any]
    trainer: str = ""
    files: dict[str, bytes | Path] = field(default_factory=dict)
    tensors: dict[str, ShardTensor] = field(default_factory=dict)
    # A file for each tensor: DCP holds on to all that it has written until the file is done, and tensors that
    # are made only when they are written must not pile up.
    file_per_tensor: bool = False

    def room(self, rank: int) -> int:
        """Bytes that this rank will write, or a little more."""
        size = sum(tensor.written_bytes for tensor in self.tensors.values())
        if rank == 0:
            others = _expand(self.files).values()
            size += len(self.trainer) + sum(
                len(other) if isinstance(other, bytes) else other.stat().st_size for other in others
            )
        return size + RANK_BYTES


def write_checkpoint(
    root: Path,
    contents: Callable[[], Contents],
    step: int,
    keep_last: int,
    keep_every: int,
    group: dist.ProcessGroup | None = None,
) -> bool:
    """Writes one checkpoint; collective. False when the step has a complete one already: that is left alone.

    `contents` may raise, like everything else here: any rank's failure is `RanksFailed` on all, and leaves
    nothing.
    """
    partial, final = root / f".partial-{folders.step_name(step)}", root / folders.step_name(step)

    rank = dist.get_rank(group)
    staged: list[Contents] = []

    def begin() -> int | None:
        """`Contents.room` of this rank; None when the step has a complete checkpoint."""
        staged.append(contents())
        if rank == 0 and not _make_partial(root, partial, final):
            return None
        return staged[0].room(rank)

    try:
        sizes = gather_from_ranks("preparing the checkpoint", begin, group)
        if sizes[0] is None:
            if rank == 0:
                logger.info("step %d has a complete checkpoint already: not saved again", step)
            return False
        needed = sum(size or 0 for size in sizes)
        on_first_rank("looking for room", lambda: _require_room(root, needed), group)
        fill_folder(partial, final, staged[0], group)
    except RanksFailed:
        # Every rank comes here; none goes on before the partial folder is gone and its space free again.
        on_first_rank(
            "removing the partial checkpoint", lambda: shutil.rmtree(partial, ignore_errors=True), group
        )
        raise
    if rank == 0:
        try:
            folders.prune(root, step, keep_last, keep_every)
        # Whatever it is, the checkpoint is saved, and so all other ranks believe.
        except Exception as error:
            logger.error("could not remove old checkpoints in %s: %s", root, describe(error))
    return True


def fill_folder(
    partial: Path, final: Path, contents: Contents, group: dist.ProcessGroup | None = None
) -> None:
    """Fills the empty folder `partial` and, when it is complete, renames it to `final`; collective.

    On `RanksFailed` the caller removes what is left of `partial`.
    """
    _save_tensors(partial, contents, group)
    rank = dist.get_rank(group)
    parts = gather_from_ranks("reading back what was written", lambda: _own_files(rank, partial), group)
    on_first_rank("completing the checkpoint", lambda: _complete(partial, final, contents, parts), group)


def _make_partial(root: Path, partial: Path, final: Path) -> bool:
    """Rank 0 makes an empty partial folder; False when the step has a complete checkpoint."""
    if (final / MANIFEST).exists():
        return False
    root.mkdir(parents=True, exist_ok=True)
    folders.sweep(root)
    if final.exists():
        logger.error("%s has no %s, so it is no checkpoint: moved out of the way", final, MANIFEST)
        folders.set_aside(root, int(final.name.removeprefix("step-")), "damaged")
    partial.mkdir()
    return True


def _require_room(root: Path, needed: int) -> None:
    """A save that cannot fit must not first fill the disk, which metrics and other runs need.

    Quotas do not show here; they are met while writing.
    """
    free = shutil.disk_usage(root).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the checkpoint takes {needed / 1e9:.3g} GB and {free / 1e9:.3g} GB are free in {root}",
        )


class _Writer(dcp.FileSystemWriter):
    """DCP's writer with a fault point, and without the absolute path that it puts into the checkpoint."""

    def __init__(self, folder: Path, step: int, file_per_tensor: bool):
        # per_thread_copy_ahead: a non-zero value makes it open CUDA streams in this thread although all is on
        # the CPU.
        super().__init__(
            folder, thread_count=1, per_thread_copy_ahead=0, single_file_per_rank=not file_per_tensor
        )
        self._step = step

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        fault_point("save.between_shards", self._step)
        return written

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def _save_tensors(partial: Path, contents: Contents, group: dist.ProcessGroup | None) -> None:
    try:
        dcp.save(
            dict(contents.tensors),
            storage_writer=_Writer(partial, contents.step, contents.file_per_tensor),
            planner=DefaultSavePlanner(flatten_sharded_tensors=False),
            process_group=group,
        )
    except CheckpointException as error:  # DCP raises it on every rank
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RanksFailed(f"writing tensors failed on rank {rank}: {describe(cause)}") from None


def _own_files(rank: int, partial: Path) -> dict[str, dict[str, Any]]:
    """Entries for the manifest of the files that DCP has written on this rank, and of its index on rank 0."""
    names = sorted(path.name for path in partial.glob(f"__{rank}_*.distcp"))
    if rank == 0:
        names.append(".metadata")
    return {name: entry(partial / name) for name in names}


def _complete(partial: Path, final: Path, contents: Contents, parts: list[dict[str, dict[str, Any]]]) -> None:
    """Rank 0 adds its files and the manifest, and gives the folder its final name."""
    files = {name: described for part in parts for name, described in part.items()}
    others: dict[str, bytes | Path] = {TRAINER: contents.trainer.encode(), **contents.files}
    for name, source in _expand(others).items():
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(path, source if isinstance(source, bytes) else source.read_bytes())
        files[name] = entry(path)
    for folder in {(partial / name).parent for name in files}:
        sync_folder(folder)
    fault_point("save.before_manifest", contents.step)
    replace_atomically(
        partial / MANIFEST, compose(contents.step, len(parts), contents.layout, files).encode()
    )
    fault_point("save.before_rename", contents.step)
    partial.rename(final)
    sync_folder(final.parent)


def _expand(files: dict[str, bytes | Path]) -> dict[str, bytes | Path]:
    """Replaces each folder by the files below it."""
    flat: dict[str, bytes | Path] = {}
    for name, source in files.items():
        if isinstance(source, Path) and source.is_dir():
            inside = sorted(path for path in source.rglob("*") if path.is_file())
            flat |= {f"{name}/{path.relative_to(source).as_posix()}": path for path in inside}
        else:
            flat[name] = source
    return flat
