"""Whole matrices for optimizers that need them, such as Muon, from shards of any engine and layout.

Who owns: each matrix has one owner among the ranks that hold parts of it, chosen so that all ranks have about the same work.
What travels: in one all-to-all the parts go to the owners; each owner computes on its whole matrices; in another the
results go back to every rank that holds a part. No matrix is computed twice, and copies of a part get the same bits.
Rounds: only so many matrices travel at a time, which bounds the memory that an owner needs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from forge.shard import Box, Shard

MatrixIndex: TypeAlias = tuple[int, tuple[int, ...]]
"""The number of a shard, and the index in its dimensions before rows and columns."""


class Submatrix(NamedTuple):
    """Some rows and columns of a matrix."""

    matrix: MatrixIndex
    box: Box


Transfer: TypeAlias = tuple[Submatrix, int, int]
"""(what, from which rank, to which rank)"""


@dataclass
class _Matrix:
    """holders: for each box of the matrix the ranks that hold it; in the same order on all ranks."""

    index: MatrixIndex
    shape: tuple[int, ...]
    holders: dict[Box, list[int]]
    owner: int = -1

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def to_owner(self) -> Iterator[Transfer]:
        for box, holders in self.holders.items():
            # Of several copies take the owner's own, or else not always the first rank's.
            source = self.owner if self.owner in holders else holders[self.owner % len(holders)]
            yield Submatrix(self.index, box), source, self.owner

    def to_holders(self) -> Iterator[Transfer]:
        for box, holders in self.holders.items():
            for holder in holders:
                yield Submatrix(self.index, box), self.owner, holder


class WholeMatrices:
    """The matrices of `shards`: their last two dimensions; dimensions before them (experts) count matrices. Collective.

    group: ranks that together hold all of them, with shards of the same parameters in the same order (`Meshes.stage`).
    dtype: of matrices in transfers and in the function. round_numel: elements of matrices that an owner has at a time, or
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
        self._rounds = [
            (
                [matrix for matrix in some if matrix.owner == group.rank()],
                _Exchange((transfer for matrix in some for transfer in matrix.to_owner()), group),
                _Exchange((transfer for matrix in some for transfer in matrix.to_holders()), group),
            )
            for some in _divide_into_rounds(matrices, round_numel)
        ]

    @torch.no_grad()
    def replace(self, tensors: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """Replace every matrix by `function(matrix)`, in all parts that `tensors` hold. Collective.

        tensors: gradients or momenta, one per shard, contiguous and laid out like its `data`. function: from
        `[rows, columns]` to the same shape; called once per matrix, on its owner. Does not wait for the device.
        """
        assert all(tensor.is_contiguous() for tensor in tensors), "pieces would be copies"
        # Views: what is written to them is written to `tensors`.
        held = {
            part: piece[place]
            for number, (shard, tensor) in enumerate(zip(self._shards, tensors, strict=True))
            for box, piece in shard.pieces(tensor)
            for place, part in _submatrices(number, box)
        }
        empty = tensors[0].new_empty(0, dtype=self._dtype)
        for own, to_owners, to_holders in self._rounds:
            whole = {matrix.index: empty.new_empty(matrix.shape) for matrix in own}
            sent = [held[part] for part in to_owners.sends]
            to_owners.run(sent, [_view(whole, part) for part in to_owners.receives], empty)
            for index, matrix in whole.items():
                whole[index] = function(matrix)
            sent = [_view(whole, part) for part in to_holders.sends]
            to_holders.run(sent, [held[part] for part in to_holders.receives], empty)


class _Exchange:
    """One all-to-all. transfers: those between all ranks, in the same order on each of them."""

    def __init__(self, transfers: Iterable[Transfer], group: dist.ProcessGroup):
        me, self._group = group.rank(), group
        to: list[list[Submatrix]] = [[] for _ in range(group.size())]
        by: list[list[Submatrix]] = [[] for _ in range(group.size())]
        for part, source, target in transfers:
            if source == me:
                to[target].append(part)
            if target == me:
                by[source].append(part)
        # What goes to rank 0 first, then to rank 1, and so on: so all-to-all wants its buffers.
        self.sends, self.receives = list(itertools.chain(*to)), list(itertools.chain(*by))
        self._send_numels = [sum(part.box.numel for part in parts) for parts in to]
        self._receive_numels = [sum(part.box.numel for part in parts) for parts in by]

    def run(self, sent: list[Tensor], received: list[Tensor], empty: Tensor) -> None:
        """Send `sent` (in the order of `sends`) in the dtype of `empty`; write to `received` (in the order of `receives`)."""
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
    """Return the matrices of `shards` in their order, with the ranks that hold them. Collective."""
    mine = [(shard.name, shard.global_shape, shard.boxes) for shard in shards]
    everyones = [mine] * group.size()
    dist.all_gather_object(everyones, mine, group=group)
    found: dict[MatrixIndex, _Matrix] = {}
    for number, of_ranks in enumerate(zip(*everyones, strict=True)):
        assert len({(name, shape) for name, shape, _ in of_ranks}) == 1, "ranks have other parameters"
        shape = of_ranks[0][1]
        for rank, (_, _, boxes) in enumerate(of_ranks):
            for _, (index, box) in (part for whole in boxes for part in _submatrices(number, whole)):
                matrix = found.setdefault(index, _Matrix(index, tuple(shape[-2:]), {}))
                matrix.holders.setdefault(box, []).append(rank)
    for matrix in found.values():
        held = sum(box.numel for box in matrix.holders)
        assert held == matrix.numel, f"{shards[matrix.index[0]].name}: copies are cut in different places"
    return list(found.values())


def _submatrices(number: int, box: Box) -> Iterator[tuple[tuple[int, ...], Submatrix]]:
    """Yield the parts of matrices in `box` of shard `number`, each with its index in a tensor of the box's shape."""
    inner = Box(box.offsets[-2:], box.sizes[-2:])
    for place in itertools.product(*(range(size) for size in box.sizes[:-2])):
        index = tuple(offset + at for offset, at in zip(box.offsets, place, strict=False))
        yield place, Submatrix((number, index), inner)


def _choose_owners(matrices: Sequence[_Matrix]) -> None:
    """Give each matrix, large ones first, to the rank that owns least so far among those that hold parts of it."""
    owned: Counter[int] = Counter()
    for matrix in sorted(matrices, key=lambda matrix: -matrix.numel):
        held: Counter[int] = Counter()
        for box, holders in matrix.holders.items():
            held.update(dict.fromkeys(holders, box.numel))
        matrix.owner = min(held, key=lambda rank: (owned[rank], -held[rank], rank))
        owned[matrix.owner] += matrix.numel


def _divide_into_rounds(matrices: Sequence[_Matrix], round_numel: int) -> list[list[_Matrix]]:
    """Divide into rounds in which no owner has more than `round_numel` elements, or one matrix."""
    rounds: list[list[_Matrix]] = []
    current: Counter[int] = Counter()  # owner -> its latest round
    filled: Counter[int] = Counter()  # owner -> elements in that round
    for matrix in matrices:
        owner = matrix.owner
        if filled[owner] and filled[owner] + matrix.numel > round_numel:
            current[owner] += 1
            filled[owner] = 0
        filled[owner] += matrix.numel
        if current[owner] == len(rounds):
            rounds.append([])
        rounds[current[owner]].append(matrix)
    return rounds


def _view(whole: dict[MatrixIndex, Tensor], part: Submatrix) -> Tensor:
    (row, column), (rows, columns) = part.box.offsets, part.box.sizes
    return whole[part.matrix][row : row + rows, column : column + columns]
