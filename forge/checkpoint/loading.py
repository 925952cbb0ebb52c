"""Reading a checkpoint: its tensors into shards of any layout, its JSON, and never code.

Every rank reads DCP's index and fetches what it holds, without talking to the others; they only agree at the
start that the checkpoint fits the model, and at the end that all could read it.
"""

from __future__ import annotations

import io
import json
import pickle
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

from forge.checkpoint.commit import TRAINER
from forge.checkpoint.manifest import check_content
from forge.checkpoint.tensors import NamedTensors, ShardTensor
from forge.distributed import RanksFailed, gather_from_ranks, on_every_rank
from forge.errors import NO_CHECKPOINT, UserError
from forge.shard import Shard, local

_SHOWN = 5


def read_state(path: Path) -> dict[str, Any]:
    """The trainer's state, as it was given to `save`. Not collective."""
    return json.loads((path / TRAINER).read_text("utf-8"))


def read_config(path: Path) -> str:
    """The TOML text of the run that saved the checkpoint. Not collective."""
    return (path / "config.toml").read_text("utf-8")


def load(path: Path, tensors: NamedTensors, group: dist.ProcessGroup | None = None) -> None:
    """Fills the values in place from the checkpoint at `path`, cast to their dtype; collective over `group`.

    Names that the checkpoint lacks, and shapes that differ, are a `UserError` on every rank. So are names
    that it has and no rank asks for, in a section (`model`, `optimizer`: a name up to its first dot) of which
    something is asked for; loading only the weights of a training checkpoint is fine.
    """
    reader = _Reader(path)
    wanted = {name: pair for name, pair in tensors.items() if pair[0].global_shape.numel()}
    try:
        comparisons = gather_from_ranks("reading the index", lambda: _compare(reader.index(), wanted), group)
        _refuse_misfits(path, reader.index(), comparisons)
        on_every_rank("reading tensors", lambda: _read(reader, wanted), group)
    except RanksFailed as error:
        raise UserError(f"checkpoint {path} cannot be loaded: {error}", NO_CHECKPOINT) from error


class TensorReader:
    """The tensors of a checkpoint one by one, whole, in one process. The caller has verified the checkpoint."""

    def __init__(self, path: Path):
        self._reader = _Reader(path)

    def tensors(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of every tensor, by its name."""
        saved = self._reader.index().state_dict_metadata
        return {
            name: (entry.size, entry.properties.dtype)
            for name, entry in saved.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """The tensor `name` in its own dtype; beside it one of its pieces, as a rank saved it, is in memory."""
        shape, dtype = self.tensors()[name]
        values = torch.empty(shape, dtype=dtype)
        _read(self._reader, {name: (Shard.whole(name, values), values)})
        return values


@dataclass(frozen=True)
class _Comparison:
    """What one rank wants, against what the checkpoint has; small, because every rank gets every other's."""

    missing: list[str]
    shapes: list[str]
    asked: int  # bit i: this rank wants the i-th name of the index
    sections: set[str]


def _compare(index: Metadata, wanted: NamedTensors) -> _Comparison:
    saved = index.state_dict_metadata
    missing, shapes, asked = [], [], 0
    for name, (shard, _) in wanted.items():
        has = saved.get(name)
        if not isinstance(has, TensorStorageMetadata):
            missing.append(name)
        elif has.size != shard.global_shape:
            shapes.append(f"{name} is {_shape(has.size)} there and {_shape(shard.global_shape)} here")
    for i, name in enumerate(saved):
        asked |= (name in wanted) << i
    # One more than will be shown tells that there are more.
    return _Comparison(
        missing[: _SHOWN + 1], shapes[: _SHOWN + 1], asked, {_section(name) for name in wanted}
    )


def _refuse_misfits(path: Path, index: Metadata, comparisons: list[_Comparison]) -> None:
    asked, sections = 0, set()
    for comparison in comparisons:
        asked |= comparison.asked
        sections |= comparison.sections
    names = list(index.state_dict_metadata)
    unexpected = [name for i, name in enumerate(names) if not asked >> i & 1 and _section(name) in sections]
    missing = list(dict.fromkeys(name for comparison in comparisons for name in comparison.missing))
    shapes = list(dict.fromkeys(text for comparison in comparisons for text in comparison.shapes))
    complaints = []
    if missing:
        complaints.append(f"it lacks {_some(missing)}; it has {len(names)} tensors: {_some(names)}")
    if shapes:
        complaints.append(f"shapes differ: {_some(shapes, '; ')}")
    if unexpected:
        complaints.append(f"it has what this model has not: {_some(unexpected)}")
    if complaints:
        raise UserError(f"checkpoint {path} does not fit the configured model: {'; '.join(complaints)}")


def _read(reader: _Reader, wanted: NamedTensors) -> None:
    targets, copies = {}, []
    for name, (shard, values) in wanted.items():
        values = local(values).detach()
        contiguous = values.contiguous()
        if contiguous is not values:
            copies.append((values, contiguous))
        targets[name] = ShardTensor(shard, contiguous)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), reader.index(), is_coordinator=False)
    plan = planner.create_local_plan()
    found = sum(prod(item.lengths) for item in plan.items)
    expected = sum(box.numel for shard, _ in wanted.values() for box in shard.boxes)
    if found != expected:
        raise ValueError(f"the index covers {found} of the {expected} elements that this rank holds")
    reader.set_up_storage_reader(reader.index(), is_coordinator=False)
    reader.read_data(planner.finish_plan(plan), planner).wait()
    for values, contiguous in copies:
        values.copy_(contiguous)


class _Reader(dcp.FileSystemReader):
    """DCP's reader, except that the index, a pickle, is compared with its checksum before it is opened, and may
    name nothing but DCP's own plain records. (Tensors are read by `torch.load(weights_only=True)`.)"""

    _index: Metadata | None = None

    def index(self) -> Metadata:
        if self._index is None:
            self._index = self.read_metadata()
        return self._index

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        content = (Path(self.path) / ".metadata").read_bytes()
        check_content(Path(self.path), ".metadata", content)
        metadata = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f".metadata holds a {type(metadata).__name__}")
        metadata.storage_meta = StorageMeta()
        return metadata


_RECORDS = "torch.distributed.checkpoint."
_ADMITTED = {
    *(
        (_RECORDS + "metadata", name)
        for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")
    ),
    *((_RECORDS + "metadata", f"{name}StorageMetadata") for name in ("Tensor", "Chunk", "Bytes")),
    (_RECORDS + "metadata", "_MEM_FORMAT_ENCODING"),
    (_RECORDS + "filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    # DCP's own writer puts the folder's path in.
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _ADMITTED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata refers to {module}.{name}, which no checkpoint needs")


def _section(name: str) -> str:
    return name.partition(".")[0]


def _shape(size: torch.Size) -> str:
    return "x".join(map(str, size)) or "a scalar"


def _some(items: list[str], separator: str = ", ") -> str:
    return separator.join(items[:_SHOWN]) + (f"{separator}..." if len(items) > _SHOWN else "")
