"""Loading a checkpoint: its tensors into shards of any layout, and its JSON; never code.

Every rank reads DCP's index and, from the files of all ranks that saved, the pieces that overlap its own boxes. Ranks only
agree at the start that the checkpoint fits the model, and at the end that all of them could read it.
"""

from __future__ import annotations

import enum
import hashlib
import io
import json
import pickle
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from forge.checkpoint.manifest import Damaged, read_manifest
from forge.checkpoint.tensors import NamedTensors, ShardTensor
from forge.distributed import RanksFailed, gather_from_ranks, on_every_rank
from forge.errors import NO_CHECKPOINT, UserError
from forge.shard import Shard, local

TRAINER = "trainer.json"
_SHOWN = 5


def read_state(path: Path) -> dict[str, Any]:
    """Return the trainer's state, as it was passed to `Checkpoints.save`. Not collective."""
    return json.loads((path / TRAINER).read_text("utf-8"))


def read_config(path: Path) -> str:
    """Return the TOML text of the run that saved the checkpoint. Not collective."""
    return (path / "config.toml").read_text("utf-8")


def load(
    path: Path, tensors: NamedTensors, group: dist.ProcessGroup | None = None, unused: Collection[str] = ()
) -> None:
    """Fill the values in place from the checkpoint at `path`, cast to their dtype. Collective over `group`.

    Raises UserError on every rank: exit 2 for names that the checkpoint lacks, for shapes that differ, and for names, not
    ending in a part of `unused`, that no rank asks for in a section (`model`, `optimizer`: a name up to its first dot) of
    which something is asked for (so the weights of a checkpoint may be loaded alone); exit 77 if a rank cannot read it.
    """
    reader = TensorReader(path)
    wanted = {name: pair for name, pair in tensors.items() if pair[0].global_shape.numel()}
    try:
        comparisons = gather_from_ranks("reading the index", lambda: _compare(reader.index(), wanted), group)
        _refuse_misfits(path, reader.index(), comparisons, unused)
        on_every_rank("reading tensors", lambda: _read(reader, wanted), group)
    except RanksFailed as error:
        raise UserError(f"checkpoint {path} cannot be loaded: {error}", NO_CHECKPOINT) from error


@dataclass(frozen=True)
class _Comparison:
    """What one rank asks for, compared with the index. Small, because it is sent to every rank."""

    missing: list[str]
    shapes: list[str]
    asked: int  # bit i: this rank asks for the i-th name of the index


def _compare(index: Metadata, wanted: NamedTensors) -> _Comparison:
    saved = index.state_dict_metadata
    missing, shapes = [], []
    for name, (shard, _) in wanted.items():
        has = saved.get(name)
        if not isinstance(has, TensorStorageMetadata):
            missing.append(name)
        elif has.size != shard.global_shape:
            shapes.append(f"{name} is {_shape(has.size)} there and {_shape(shard.global_shape)} here")
    asked = sum((name in wanted) << i for i, name in enumerate(saved))
    # One more than is shown, to say that there are more.
    return _Comparison(missing[: _SHOWN + 1], shapes[: _SHOWN + 1], asked)


def _refuse_misfits(
    path: Path, index: Metadata, comparisons: list[_Comparison], unused: Collection[str]
) -> None:
    names = list(index.state_dict_metadata)
    missing = list(dict.fromkeys(name for comparison in comparisons for name in comparison.missing))
    shapes = list(dict.fromkeys(text for comparison in comparisons for text in comparison.shapes))
    asked = {name for one in comparisons for i, name in enumerate(names) if one.asked >> i & 1}
    sections = {_section(name) for name in [*asked, *missing]}
    extra = (name for name in names if name not in asked and name.rpartition(".")[2] not in unused)
    unexpected = [name for name in extra if _section(name) in sections]
    complaints = []
    if missing:
        complaints.append(f"it lacks {_some(missing)}; it has {len(names)} tensors: {_some(names)}")
    if shapes:
        complaints.append(f"shapes differ: {_some(shapes, '; ')}")
    if unexpected:
        complaints.append(f"it has tensors that this model has not: {_some(unexpected)}")
    if complaints:
        raise UserError(f"checkpoint {path} does not fit the configured model: {'; '.join(complaints)}")


def _read(reader: TensorReader, wanted: NamedTensors) -> None:
    # DCP loads into contiguous memory, box by box.
    targets, copies = {}, []
    for name, (shard, values) in wanted.items():
        values = local(values).detach()
        contiguous = values.contiguous()
        if contiguous is not values:
            copies.append((values, contiguous))
        targets[name] = ShardTensor(shard, contiguous)
    # The plan has an item for each overlap of a saved chunk with one of our boxes, whichever layouts both come from. Made
    # without a collective: each rank needs only its own.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), reader.index(), is_coordinator=False)
    plan = planner.create_local_plan()
    # DCP skips what no chunk covers; a gap in the index must not leave old values in place.
    found = sum(prod(item.lengths) for item in plan.items)
    expected = sum(box.numel for shard, _ in wanted.values() for box in shard.boxes)
    if found != expected:
        raise ValueError(f"the index covers {found} of the {expected} elements that this rank holds")
    reader.set_up_storage_reader(reader.index(), is_coordinator=False)
    reader.read_data(planner.finish_plan(plan), planner).wait()
    for values, contiguous in copies:
        values.copy_(contiguous)


class TensorReader(dcp.FileSystemReader):
    """DCP's reader of the checkpoint at `path`, with a safe index, which also reads single tensors in one process.

    The index is a pickle: its checksum is compared before it is opened, and it may name nothing but DCP's own plain
    records. (DCP reads tensors by `torch.load(weights_only=True)`.) The caller has verified all other files.
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

    def index(self) -> Metadata:
        if self._index is None:
            self._index = self.read_metadata()
        return self._index

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        folder = Path(self.path)
        content = (folder / ".metadata").read_bytes()
        expected = read_manifest(folder)["files"].get(".metadata", {})
        if hashlib.sha256(content).hexdigest() != expected.get("sha256"):
            raise Damaged(".metadata has a wrong checksum")
        metadata = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f".metadata holds a {type(metadata).__name__}")
        metadata.storage_meta = StorageMeta()
        return metadata


_ADMITTED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    # DCP's own writer adds the folder's path.
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


def _enum_member(kind: Any, name: Any) -> enum.Enum:
    """What `getattr` may do in a pickle: Python 3.11.0 to 3.11.3 pickle a member of an enumeration by class and name."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f".metadata refers to an attribute {name!r}, which no checkpoint needs")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata refers to {module}.{name}, which no checkpoint needs")


def _section(name: str) -> str:
    return name.partition(".")[0]


def _shape(size: torch.Size) -> str:
    return "x".join(map(str, size)) or "a scalar"


def _some(items: list[str], separator: str = ", ") -> str:
    return separator.join(items[:_SHOWN]) + (f"{separator}..." if len(items) > _SHOWN else "")
