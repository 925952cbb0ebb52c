"""Load a checkpoint: its tensors into shards of any layout, and its JSON. Loading never runs code from the checkpoint.

A box is a rectangular slice of a global tensor. Every rank reads DCP's index. Then the rank reads the saved chunks that
overlap its own boxes, from the files of all saving ranks. Ranks communicate only twice. At the start they agree that
the checkpoint fits the model. At the end they agree that every rank could read its chunks.
"""

from __future__ import annotations

import enum
import hashlib
import io
import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from forge.checkpoint.manifest import MANIFEST, Damaged, find_damage, read_manifest
from forge.checkpoint.tensors import NamedTensors, ShardTensor
from forge.config import Config, Phases, parse_toml_text
from forge.config.phases import config_of
from forge.runtime.causes import Cause
from forge.runtime.distributed import RanksFailed, gather_from_ranks, on_every_rank, single_process_group
from forge.runtime.errors import FAILED, NO_CHECKPOINT, UserError
from forge.shard import Shard, local

TRAINER = "trainer.json"


def read_state(path: Path) -> dict[str, Any]:
    """Return the trainer's state as passed to `Checkpoints.save`. Not collective."""
    return json.loads((path / TRAINER).read_text("utf-8"))


def read_config(path: Path) -> str:
    """Return the saving run's config as TOML. Not collective."""
    return (path / "config.toml").read_text("utf-8")


def saved_config(path: Path) -> Config:
    """Return the saving run's config. Not collective. Classes named in the config are not imported."""
    return parse_toml_text(read_config(path), str(path / "config.toml"), stored=True, import_classes=False)


def trained_config(path: Path) -> Config:
    """Return the saving run's config with the keys of the checkpoint's last step and without phases (see `config_of`).

    Not collective. The weights are adapted to the window, the document mask and the sequence length that they were last
    trained with. Imported and averaged weights have no last step: their config is returned unchanged.
    """
    config = saved_config(path)
    if not config.phase:
        return config
    progress = read_state(path).get("progress")
    if progress is None or not progress["step"]:
        return config
    step, tokens, began = progress["step"], progress["tokens"], progress.get("last_step_at")
    return config_of(config, Phases(config).ended_at(step, tokens, began))


Fetch: TypeAlias = Callable[[set[str]], None]
"""Function that copies the named files into a checkpoint's folder on this node. Collective."""


def load(
    path: Path,
    tensors: NamedTensors,
    group: dist.ProcessGroup | None = None,
    unused: Collection[str] = (),
    fetch: Fetch | None = None,
) -> None:
    """Fill `tensors` in place from the checkpoint at `path`, cast to the dtypes of `tensors`. Collective over `group`.

    fetch: called with the names of the files needed by this rank. The section of a tensor is its name up to the first
    dot: `model` or `optimizer`. Sections without a requested tensor are ignored, so weights can be loaded alone.

    Raises UserError with exit code 2 on every rank if the checkpoint lacks a requested tensor, if a shape differs, or if a
    requested section of the checkpoint has a tensor that no rank requests. A tensor whose last name component is in
    `unused` need not be requested. Raises UserError with exit code 77 if a rank cannot read the checkpoint,
    and RanksFailed (exit 1) if a rank's memory or disk is full.
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
        if error.cause in (Cause.DISK_FULL, Cause.OUT_OF_MEMORY):
            raise  # the checkpoint is intact
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
    """Return a planner and a load plan. The plan has one item for each overlap of a saved chunk with a box of this rank.

    The saving run may have had another layout.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), index, is_coordinator=False)
    return planner, planner.create_local_plan()  # not collective: each rank needs only its own plan


class TensorReader(dcp.FileSystemReader):
    """DCP's reader of the checkpoint at `path`, with safe unpickling of the index.

    Can also read single tensors in one process.

    DCP itself reads tensors with `torch.load(weights_only=True)`. The caller must have verified all files except the index.
    """

    _index: Metadata | None = None

    def tensors(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return a dict from the name of every tensor to (shape, dtype)."""
        saved = self.index().state_dict_metadata.items()
        return {
            name: (entry.size, entry.properties.dtype)
            for name, entry in saved
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """Return the tensor `name` in its saved dtype. Needs memory for the tensor and one saved chunk."""
        shape, dtype = self.tensors()[name]
        values = torch.empty(shape, dtype=dtype)
        _read(self, {name: (Shard.whole(name, values), values)})
        return values

    @classmethod
    def verified(
        cls, path: Path, report: Callable[[int, int], None] = lambda done, total: None
    ) -> TensorReader:
        """Verify the checkpoint at `path` in this process and return its reader. report: see `find_damage`.

        Raises UserError (exit 77) if the checkpoint is damaged or cannot be read, and UserError (exit 1) if its run removes
        it meanwhile.
        """
        manifest = path / MANIFEST
        was_complete = manifest.is_file()
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
            if was_complete and not manifest.is_file():
                problem = "was removed by its run while it was read; run the command again, or raise checkpoint.keep_last"
                raise UserError(f"checkpoint {path} {problem}", FAILED) from None
            raise UserError(f"checkpoint {path} is damaged: {error}", NO_CHECKPOINT) from None
        return reader

    def files_of(self, wanted: NamedTensors) -> set[str]:
        """Return the names of the files that contain elements of the `wanted` shards."""
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


def read_index(folder: Path) -> Metadata:
    """Return DCP's index of the checkpoint in `folder`. Not collective.

    Raises Damaged if the index is invalid. A valid index refers only to bytes within files of the manifest, and to no
    tensor larger than these files together.
    """
    content = (folder / ".metadata").read_bytes()
    files = read_manifest(folder)["files"]
    if hashlib.sha256(content).hexdigest() != files.get(".metadata", {}).get("sha256"):
        raise Damaged(".metadata has a wrong checksum")
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise Damaged(f".metadata cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise Damaged(f".metadata holds a {type(metadata).__name__} instead of DCP's Metadata")
    metadata.storage_meta = StorageMeta()
    _require_within(metadata, files)
    return metadata


def _require_within(metadata: Metadata, files: dict[str, Any]) -> None:
    for place in (metadata.storage_data or {}).values():
        size = files.get(place.relative_path, {}).get("size")
        if size is None:
            raise Damaged(f".metadata refers to {place.relative_path}, which is not a file of the checkpoint")
        if not 0 <= place.offset <= place.offset + place.length <= size:
            raise Damaged(f".metadata refers to bytes after the end of {place.relative_path}")
    total = sum(file["size"] for file in files.values())
    for name, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            needed = prod(saved.size) * saved.properties.dtype.itemsize
            if min(saved.size, default=0) < 0 or needed > total:
                raise Damaged(
                    f".metadata says that {name} has {needed} bytes, but all files together have {total}"
                )


_ADMITTED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    # DCP's own writer stores the folder's path.
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


def _enum_member(kind: Any, name: Any) -> enum.Enum:
    """Return the member `name` of the enum `kind`. Replaces `getattr` in an unpickler, and refuses all other attributes.

    Python 3.11.0 to 3.11.3 pickle an enum member as a call of `getattr` with the enum class and the member's name.
    """
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(
        f".metadata names the attribute {name!r}, which no checkpoint contains; it was not loaded"
    )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f".metadata names {module}.{name}, which no checkpoint contains; it was not loaded"
        )


_SHOWN = 5


@dataclass(frozen=True)
class IndexComparison:
    """The result of comparing one rank's requested tensors with the index. Small, because it is sent to every rank.

    missing: tensors not in the index. shapes: a sentence for each differing shape. Both lists are truncated.
    """

    missing: list[str]
    shapes: list[str]
    asked: int  # bit i: this rank requests the i-th name of the index


def compare(index: Metadata, wanted: NamedTensors) -> IndexComparison:
    """Compare this rank's requested tensors with the `index` of a checkpoint. Not collective."""
    saved = index.state_dict_metadata
    missing, shapes = [], []
    for name, (shard, _) in wanted.items():
        has = saved.get(name)
        if not isinstance(has, TensorStorageMetadata):
            missing.append(name)
        elif has.size != shard.global_shape:
            shapes.append(
                f"{name} is {_shape(has.size)} in the checkpoint and {_shape(shard.global_shape)} in the model"
            )
    asked = sum((name in wanted) << i for i, name in enumerate(saved))
    # Keep one entry more than the message shows, so the message can say that there are more.
    return IndexComparison(missing[: _SHOWN + 1], shapes[: _SHOWN + 1], asked)


def refuse_misfits(
    path: Path, index: Metadata, comparisons: list[IndexComparison], unused: Collection[str]
) -> None:
    """Raise UserError (exit 2) if `comparisons` show that the checkpoint does not fit the model.

    Not collective: every rank passes the comparisons of all ranks, so all raise the same error. unused: last components
    of tensor names that the model may lack.
    """
    names = list(index.state_dict_metadata)
    missing = list(dict.fromkeys(name for comparison in comparisons for name in comparison.missing))
    shapes = list(dict.fromkeys(text for comparison in comparisons for text in comparison.shapes))
    asked = {name for one in comparisons for i, name in enumerate(names) if one.asked >> i & 1}
    sections = {_section(name) for name in [*asked, *missing]}
    extra = (name for name in names if name not in asked and name.rpartition(".")[2] not in unused)
    unexpected = [name for name in extra if _section(name) in sections]
    complaints = []
    if missing:
        complaints.append(
            f"the checkpoint lacks {_some(missing)}; its {len(names)} tensors are {_some(names)}"
        )
    if shapes:
        complaints.append(f"shapes differ: {_some(shapes, '; ')}")
    if unexpected:
        complaints.append(f"the model lacks these tensors of the checkpoint: {_some(unexpected)}")
    if complaints:
        problem = f"checkpoint {path} does not fit the configured model: {'; '.join(complaints)}"
        raise UserError(problem, cause=Cause.CHANGED_SETTINGS)


def _section(name: str) -> str:
    return name.partition(".")[0]


def _shape(size: torch.Size) -> str:
    return "x".join(map(str, size)) or "a scalar"


def _some(items: list[str], separator: str = ", ") -> str:
    return separator.join(items[:_SHOWN]) + (f"{separator}..." if len(items) > _SHOWN else "")


def require_tiled(plan: LoadPlan, targets: dict[str, ShardTensor]) -> None:
    """Raise ValueError unless the chunks to read cover each element of the targets exactly once.

    DCP skips uncovered elements, so they would keep their old values. The check counts the corners of chunks, with
    alternating signs. The chunks tile a box if and only if their signed corners add up to those of the box.
    """
    corners: dict[tuple[str, tuple[int, ...]], Counter[tuple[int, ...]]] = defaultdict(Counter)

    def add(
        key: tuple[str, tuple[int, ...]], offsets: Sequence[int], lengths: Sequence[int], sign: int
    ) -> None:
        for high in product((0, 1), repeat=len(offsets)):
            place = tuple(o + length * h for o, length, h in zip(offsets, lengths, high, strict=True))
            corners[key][place] += sign * (-1) ** sum(high)

    for item in plan.items:
        assert item.dest_index.offset is not None
        add((item.dest_index.fqn, tuple(item.dest_index.offset)), item.dest_offsets, item.lengths, 1)
    for name, target in targets.items():
        for chunk in target.__create_chunk_list__():
            add((name, tuple(chunk.offsets)), [0] * len(chunk.sizes), chunk.sizes, -1)
    for (name, offset), left in corners.items():
        if any(left.values()):
            raise ValueError(
                f"the index has a gap or an overlap in {name}, in the piece that begins at {list(offset)}"
            )
