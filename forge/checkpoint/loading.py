"""Loading a checkpoint: its tensors into shards of any layout, and its JSON; never code.

Every rank reads DCP's index and, from the files of all ranks that saved, the pieces that overlap its own boxes. Ranks only
agree at the start that the checkpoint fits the model, and at the end that all of them could read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from forge.checkpoint.fitting import compare, refuse_misfits, require_tiled
from forge.checkpoint.index import read_index
from forge.checkpoint.manifest import Damaged, find_damage
from forge.checkpoint.tensors import NamedTensors, ShardTensor
from forge.runtime.distributed import RanksFailed, gather_from_ranks, on_every_rank, single_process_group
from forge.runtime.errors import NO_CHECKPOINT, UserError
from forge.shard import Shard, local

TRAINER = "trainer.json"


def read_state(path: Path) -> dict[str, Any]:
    """Return the trainer's state, as it was passed to `Checkpoints.save`. Not collective."""
    return json.loads((path / TRAINER).read_text("utf-8"))


def read_config(path: Path) -> str:
    """Return the TOML text of the run that saved the checkpoint. Not collective."""
    return (path / "config.toml").read_text("utf-8")


Fetch: TypeAlias = Callable[[set[str]], None]
"""Brings the files of these names into a checkpoint's folder. Collective."""


def load(
    path: Path,
    tensors: NamedTensors,
    group: dist.ProcessGroup | None = None,
    unused: Collection[str] = (),
    fetch: Fetch | None = None,
) -> None:
    """Fill the values in place from the checkpoint at `path`, cast to their dtype. Collective over `group`.

    fetch: called with the names of the files that this rank is about to read.

    Raises UserError on every rank: exit 2 for names that the checkpoint lacks, for shapes that differ, and for names, not
    ending in a part of `unused`, that no rank asks for in a section (`model`, `optimizer`: a name up to its first dot) of
    which something is asked for (so the weights of a checkpoint may be loaded alone); exit 77 if a rank cannot read it.
    """
    reader = TensorReader(path)
    wanted = {name: pair for name, pair in tensors.items() if pair[0].global_shape.numel()}
    try:
        comparisons = gather_from_ranks("reading the index", lambda: compare(reader.index(), wanted), group)
        refuse_misfits(path, reader.index(), comparisons, unused)
        if fetch is not None:
            fetch(on_every_rank("planning what to read", lambda: reader.files_of(wanted), group))
        on_every_rank("reading tensors", lambda: _read(reader, wanted), group)
    except RanksFailed as error:
        raise UserError(f"checkpoint {path} cannot be loaded: {error}", NO_CHECKPOINT) from error


def _read(reader: TensorReader, wanted: NamedTensors) -> None:
    # DCP loads into contiguous memory, box by box.
    targets, copies = {}, []
    for name, (shard, values) in wanted.items():
        values = local(values).detach()
        contiguous = values.contiguous()
        if contiguous is not values:
            copies.append((values, contiguous))
        targets[name] = ShardTensor(shard, contiguous)
    planner, plan = _plan(reader.index(), targets)
    require_tiled(plan, targets)
    reader.set_up_storage_reader(reader.index(), is_coordinator=False)
    reader.read_data(planner.finish_plan(plan), planner).wait()
    for values, contiguous in copies:
        values.copy_(contiguous)


def _plan(index: Metadata, targets: dict[str, ShardTensor]) -> tuple[DefaultLoadPlanner, LoadPlan]:
    """The plan has an item for each overlap of a saved chunk with one of our boxes, whichever layouts both come from."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), index, is_coordinator=False)
    return planner, planner.create_local_plan()  # without a collective: each rank needs only its own


class TensorReader(dcp.FileSystemReader):
    """DCP's reader of the checkpoint at `path`, with a safe index, which also reads single tensors in one process.

    (DCP reads tensors by `torch.load(weights_only=True)`.) The caller has verified all files but the index.
    """

    _index: Metadata | None = None

    def tensors(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return the shape and dtype of every tensor, by its name."""
        saved = self.index().state_dict_metadata.items()
        return {
            name: (entry.size, entry.properties.dtype)
            for name, entry in saved
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """Return the tensor `name` in its own dtype. One of its saved pieces at a time is in memory beside it."""
        shape, dtype = self.tensors()[name]
        values = torch.empty(shape, dtype=dtype)
        _read(self, {name: (Shard.whole(name, values), values)})
        return values

    @classmethod
    def verified(
        cls, path: Path, report: Callable[[int, int], None] = lambda done, total: None
    ) -> TensorReader:
        """Verify the checkpoint at `path` in this process and return its reader. report: as for `find_damage`.

        Raises UserError (exit 77) if the checkpoint is damaged or cannot be read.
        """
        try:
            with single_process_group():
                damage = find_damage(path, report=report)
            if damage is not None:
                raise Damaged(damage)
            reader = cls(path)
            reader.index()
        except RanksFailed as error:
            raise UserError(f"checkpoint {path} cannot be verified: {error}", NO_CHECKPOINT) from None
        except Damaged as error:
            raise UserError(f"checkpoint {path} is damaged: {error}", NO_CHECKPOINT) from None
        return reader

    def files_of(self, wanted: NamedTensors) -> set[str]:
        """Return the names of the files with pieces of these shards."""
        targets = {
            name: ShardTensor(shard, local(values).detach().contiguous())
            for name, (shard, values) in wanted.items()
        }
        _, plan = _plan(self.index(), targets)
        return {self.index().storage_data[item.storage_index].relative_path for item in plan.items}

    def index(self) -> Metadata:
        if self._index is None:
            self._index = self.read_metadata()
        return self._index

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return read_index(Path(self.path))
