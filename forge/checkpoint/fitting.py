"""Whether a checkpoint fits what is to be loaded from it: names and shapes, compared by all ranks together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from forge.checkpoint.tensors import NamedTensors, ShardTensor
from forge.runtime.errors import UserError

_SHOWN = 5


@dataclass(frozen=True)
class Comparison:
    """What one rank asks for, compared with the index. Small, because it is sent to every rank."""

    missing: list[str]
    shapes: list[str]
    asked: int  # bit i: this rank asks for the i-th name of the index


def compare(index: Metadata, wanted: NamedTensors) -> Comparison:
    """Compare what this rank asks for with the `index` of a checkpoint."""
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
    return Comparison(missing[: _SHOWN + 1], shapes[: _SHOWN + 1], asked)


def refuse_misfits(
    path: Path, index: Metadata, comparisons: list[Comparison], unused: Collection[str]
) -> None:
    """Raise UserError (exit 2), the same on every rank, if the `comparisons` of all ranks show a misfit."""
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


def _section(name: str) -> str:
    return name.partition(".")[0]


def _shape(size: torch.Size) -> str:
    return "x".join(map(str, size)) or "a scalar"


def _some(items: list[str], separator: str = ", ") -> str:
    return separator.join(items[:_SHOWN]) + (f"{separator}..." if len(items) > _SHOWN else "")


def require_tiled(plan: LoadPlan, targets: dict[str, ShardTensor]) -> None:
    """Check that the pieces to be read cover each element of the targets exactly once. Raises ValueError.

    DCP skips elements that no chunk covers, and old values would stay in place. Boxes tile a box exactly if their corners,
    each with the sign of its parity, add up to those of the box.
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
                f"the index does not cover each element of {name} from {list(offset)} on exactly once"
            )
