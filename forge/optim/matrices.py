"""Whole matrices for optimizers that need them, such as Muon, from shards of any engine and layout.

Each matrix has one owner among the ranks that hold parts of it. In a round, what the others hold travels to the owners
in one all-to-all, every owner computes on its matrices, and the results travel back in another, to all ranks that hold
parts. So no matrix is computed twice, and copies of a part get the same bits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from forge.shard import Box, Shard

Key: TypeAlias = tuple[int, tuple[int, ...]]
"""A matrix: the number of its shard, and its place in the dimensions before rows and columns."""
Part: TypeAlias = tuple[Key, Box]
"""Some rows and columns of a matrix."""
Move: TypeAlias = tuple[Part, int, int]
"""What travels, from which rank, to which."""


class WholeMatrices:
    """The matrices of `shards`: their last two dimensions; those before them (experts) number several. Collective.

    group: ranks that together hold all of them, with shards of the same parameters in the same order (`Meshes.stage`).
    dtype: in which matrices travel and are computed with. round_numel: elements of matrices that an owner has at a time, or
    one matrix if that has more.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        group: dist.ProcessGroup,
        *,
        dtype: torch.dtype,
        round_numel: int = 1 << 26,
    ):
        self._shards, self._dtype = shards, dtype
        matrices = _find_matrices(shards, group)
        _choose_owners(matrices)
        self._rounds = [_Round(some, group) for some in _divide(matrices, round_numel)]

    @torch.no_grad()
    def replace(self, tensors: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """Put `function(matrix)` in the place of every matrix of which `tensors` hold parts. Collective.

        tensors: gradients or momentum, one for each shard, contiguous and laid out like its `data`. function: from
        `[rows, columns]` to the same shape; called for each matrix once, on its owner. Does not wait for the device.
        """
        assert all(tensor.is_contiguous() for tensor in tensors), "pieces would be copies"
        held = {
            part: piece[place]
            for number, (shard, tensor) in enumerate(zip(self._shards, tensors, strict=True))
            for box, piece in shard.pieces(tensor)
            for place, part in _parts(number, box)
        }
        empty = tensors[0].new_empty(0, dtype=self._dtype)
        for one in self._rounds:
            whole = {matrix.key: empty.new_empty(matrix.shape) for matrix in one.own}
            one.there.run(
                [held[part] for part in one.there.sends],
                [_inside(whole, part) for part in one.there.receives],
                empty,
            )
            for key, matrix in whole.items():
                whole[key] = function(matrix)
            one.back.run(
                [_inside(whole, part) for part in one.back.sends],
                [held[part] for part in one.back.receives],
                empty,
            )


@dataclass
class _Matrix:
    """holders: the boxes that make it up, and the ranks that hold each; in the same order on all ranks."""

    key: Key
    shape: tuple[int, ...]
    holders: dict[Box, list[int]]
    owner: int = -1

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def moves_there(self) -> Iterator[Move]:
        for box, holders in self.holders.items():
            # Of several copies the owner's own, or else not always the first rank's.
            source = self.owner if self.owner in holders else holders[self.owner % len(holders)]
            yield (self.key, box), source, self.owner

    def moves_back(self) -> Iterator[Move]:
        for box, holders in self.holders.items():
            for holder in holders:
                yield (self.key, box), self.owner, holder


class _Round:
    """All owners work on `matrices` at once."""

    def __init__(self, matrices: Sequence[_Matrix], group: dist.ProcessGroup):
        self.own = [matrix for matrix in matrices if matrix.owner == group.rank()]
        self.there = _Exchange((move for matrix in matrices for move in matrix.moves_there()), group)
        self.back = _Exchange((move for matrix in matrices for move in matrix.moves_back()), group)


class _Exchange:
    """One all-to-all. moves: those of all ranks, in the same order on each."""

    def __init__(self, moves: Iterable[Move], group: dist.ProcessGroup):
        me, self._group = group.rank(), group
        to: list[list[Part]] = [[] for _ in range(group.size())]
        by: list[list[Part]] = [[] for _ in range(group.size())]
        for part, source, target in moves:
            if source == me:
                to[target].append(part)
            if target == me:
                by[source].append(part)
        self.sends, self.receives = list(itertools.chain(*to)), list(itertools.chain(*by))
        self._send_numels = [sum(box.numel for _, box in parts) for parts in to]
        self._receive_numels = [sum(box.numel for _, box in parts) for parts in by]

    def run(self, sent: list[Tensor], received: list[Tensor], empty: Tensor) -> None:
        """`sent` in the order of `sends`; written into `received` in the order of `receives`. They travel as `empty` is."""
        outgoing = torch.cat([empty, *(tensor.reshape(-1).to(empty.dtype) for tensor in sent)])
        incoming = outgoing
        if self._group.size() > 1:
            incoming = empty.new_empty(sum(self._receive_numels))
            dist.all_to_all_single(
                incoming, outgoing, self._receive_numels, self._send_numels, group=self._group
            )
        if received:
            pieces = incoming.split([tensor.numel() for tensor in received])
            shaped = [piece.view_as(tensor) for piece, tensor in zip(pieces, received, strict=True)]
            torch._foreach_copy_(received, shaped)


def _find_matrices(shards: Sequence[Shard], group: dist.ProcessGroup) -> list[_Matrix]:
    """The matrices of `shards`, in their order. Collective."""
    mine = [(shard.name, shard.global_shape, shard.boxes) for shard in shards]
    everyones = [mine] * group.size()
    dist.all_gather_object(everyones, mine, group=group)
    found: dict[Key, _Matrix] = {}
    for number, of_ranks in enumerate(zip(*everyones, strict=True)):
        assert len({(name, shape) for name, shape, _ in of_ranks}) == 1, "ranks have other parameters"
        shape = of_ranks[0][1]
        for rank, (_, _, boxes) in enumerate(of_ranks):
            for _, (key, rectangle) in (part for box in boxes for part in _parts(number, box)):
                matrix = found.setdefault(key, _Matrix(key, tuple(shape[-2:]), {}))
                matrix.holders.setdefault(rectangle, []).append(rank)
    for matrix in found.values():
        held = sum(rectangle.numel for rectangle in matrix.holders)
        assert held == matrix.numel, f"{shards[matrix.key[0]].name}: copies are cut in different places"
    return list(found.values())


def _parts(number: int, box: Box) -> Iterator[tuple[tuple[int, ...], Part]]:
    """What `box` of shard `number` holds of each matrix, and where that lies in a tensor shaped like the box."""
    rectangle = Box(box.offsets[-2:], box.sizes[-2:])
    for place in itertools.product(*(range(size) for size in box.sizes[:-2])):
        index = tuple(offset + at for offset, at in zip(box.offsets, place, strict=False))
        yield place, ((number, index), rectangle)


def _choose_owners(matrices: Sequence[_Matrix]) -> None:
    """Large ones first, each to the rank that owns least so far, of those that hold parts of it."""
    owned: Counter[int] = Counter()
    for matrix in sorted(matrices, key=lambda matrix: -matrix.numel):
        held: Counter[int] = Counter()
        for rectangle, holders in matrix.holders.items():
            held.update(dict.fromkeys(holders, rectangle.numel))
        matrix.owner = min(held, key=lambda rank: (owned[rank], -held[rank], rank))
        owned[matrix.owner] += matrix.numel


def _divide(matrices: Sequence[_Matrix], round_numel: int) -> list[list[_Matrix]]:
    """Rounds in which no owner has more than `round_numel` elements, or one matrix."""
    rounds: list[list[_Matrix]] = []
    filled: Counter[tuple[int, int]] = Counter()  # (round, owner) -> elements
    current: Counter[int] = Counter()  # owner -> its round
    for matrix in matrices:
        owner = matrix.owner
        before = filled[current[owner], owner]
        if before and before + matrix.numel > round_numel:
            current[owner] += 1
        filled[current[owner], owner] += matrix.numel
        if current[owner] == len(rounds):
            rounds.append([])
        rounds[current[owner]].append(matrix)
    return rounds


def _inside(whole: dict[Key, Tensor], part: Part) -> Tensor:
    """A view of `part` in its matrix."""
    key, rectangle = part
    (row, column), (rows, columns) = rectangle.offsets, rectangle.sizes
    return whole[key][row : row + rows, column : column + columns]
