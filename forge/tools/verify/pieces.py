"""Pieces of global tensors: the values on a rank, with their place in the global tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from forge.shard import Box, Shard

# For each dim of the global tensor: a slice, or a tuple of indices.
TensorPlace: TypeAlias = tuple[slice | tuple[int, ...], ...]
# (kind, name) of a tensor, e.g. ("gradient", "layers.0.attention.wq.weight"). Kinds of a step: initial, input, output, loss,
# norm, gradient, parameter, optimizer, router. Kinds of forwards without gradients: held-out, generation. Kinds of hooks:
# hooked, curve. Kinds of checkpoints: saved, loaded, resumed, continued.
TensorKey: TypeAlias = tuple[str, str]


@dataclass(frozen=True)
class TensorPiece:
    """The local `values` at `place` of a global tensor.

    counted: True on exactly one of the ranks with a copy of the piece.
    """

    values: Tensor
    place: TensorPlace
    counted: bool = True


def pieces_of(kind: str, tensors: Iterable[tuple[Shard, Tensor]]) -> dict[TensorKey, list[TensorPiece]]:
    """Return a dict from (kind, name of the shard) to CPU copies of this rank's pieces.

    tensors: pairs of a shard and values, shaped like `shard.data`.
    """
    found: dict[TensorKey, list[TensorPiece]] = {}
    for shard, values in tensors:
        assert (kind, shard.name) not in found, f"{shard.name} twice"
        found[kind, shard.name] = [
            TensorPiece(piece.detach().clone().cpu(), _slices(box), shard.is_primary_replica)
            for box, piece in shard.pieces(values)
        ]
    return found


def assemble(shard: Shard, values: Tensor) -> Tensor:
    """Return a copy of the whole tensor of `shard`. All elements of the tensor must be on this process.

    values: shaped like `shard.data`.
    """
    tensor = values.new_empty(shard.global_shape)
    for box, piece in shard.pieces(values):
        tensor[_slices(box)] = piece
    return tensor


def whole(values: Tensor) -> TensorPiece:
    """Return the piece that covers a whole tensor."""
    return TensorPiece(values, tuple(slice(0, size) for size in values.shape))


def _slices(box: Box) -> TensorPlace:
    return tuple(slice(o, o + size) for o, size in zip(box.offsets, box.sizes, strict=True))


def part_of(tensor: Tensor, place: TensorPlace) -> Tensor:
    """Return the elements of the global tensor `tensor` at `place`."""
    for dim, one in enumerate(place):
        if isinstance(one, slice):
            tensor = tensor.narrow(dim, one.start, one.stop - one.start)
        else:
            tensor = tensor.index_select(dim, torch.tensor(one, dtype=torch.int64))
    return tensor


def index_sum(place: TensorPlace, shape: Sequence[int]) -> int:
    """Return the sum of the flat indices of the elements at `place` in a tensor of shape `shape`."""
    along = [range(one.start, one.stop) if isinstance(one, slice) else one for one in place]
    elements = prod(map(len, along))
    if not elements:
        return 0
    strides = (prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return sum(
        stride * sum(indices) * (elements // len(indices))
        for stride, indices in zip(strides, along, strict=True)
    )


def ranges(place: TensorPlace) -> list[list[tuple[int, int]]]:
    """Return the half-open index ranges (start, stop) covered by `place`: one list per dim, in the order of `place`."""
    found: list[list[tuple[int, int]]] = []
    for one in place:
        if isinstance(one, slice):
            found.append([(one.start, one.stop)])
            continue
        of_dim: list[tuple[int, int]] = []
        for index in one:
            if of_dim and of_dim[-1][1] == index:
                of_dim[-1] = of_dim[-1][0], index + 1
            else:
                of_dim.append((index, index + 1))
        found.append(of_dim)
    return found


def global_index(place: TensorPlace, index: tuple[int, ...]) -> tuple[int, ...]:
    """Return the global index of the element with local index `index` in a piece at `place`."""
    return tuple(
        one.start + i if isinstance(one, slice) else one[i] for one, i in zip(place, index, strict=True)
    )
