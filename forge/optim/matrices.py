"""Whole matrices for optimizers such as Muon, from shards of any engine and layout.

Owners: the ranks with parts of a matrix are its holders. One holder is its owner (forge/optim/owners.py).

Transfers: one all-to-all sends the parts to the owners. Each owner computes on its whole matrices, all matrices of one
shape together. A second all-to-all returns the results to all holders. Parts held by the owner itself are only copied.
No matrix is computed twice, and replicas of a part get the same bits.

Rounds: a round sends only a few matrices, to bound the owners' memory. While a round is computed, the parts of the next
round and the results of the previous round are in flight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from forge.optim.owners import (
    MatrixPart,
    MatrixRun,
    PartTransfer,
    choose_owners,
    divide_into_rounds,
    find_runs,
    parts_of,
)
from forge.shard import Box, Shard

# On a CPU, larger rounds are not faster, and malloc would return their memory to the system after each round.
ROUND_NUMEL = {"cuda": 1 << 24, "cpu": 1 << 19}


@dataclass(frozen=True)
class MatrixBatch:
    """Matrices of one shape that one rank computes together: the matrices of all `runs`, in order."""

    shape: tuple[int, ...]
    runs: tuple[MatrixRun, ...]

    @property
    def count(self) -> int:
        return sum(run.count for run in self.runs)


Function: TypeAlias = Callable[[Tensor, MatrixBatch], Tensor]


class WholeMatrices:
    """Assembles whole matrices of `shards` on their owner ranks, and returns results to all holders. Collective.

    A shard of three dimensions is a stack of matrices, e.g. experts.

    group: ranks that together hold all matrices, with shards of the same parameters in the same order (`Meshes.stage`);
    None: only this process. dtype: dtype of transfers and of the function's matrices. heads: for each shard, the number
    of matrices into which the rows of a 2-D shard are divided; None: 1. round_numel: maximum number of elements per
    owner and round (a larger matrix has a round of its own); None: ROUND_NUMEL of the shards' device.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        group: dist.ProcessGroup | None,
        *,
        dtype: torch.dtype,
        heads: Sequence[int] | None = None,
        round_numel: int | None = None,
    ):
        self._shards, self._dtype = shards, dtype
        self._heads = [1] * len(shards) if heads is None else list(heads)
        if round_numel is None:
            round_numel = ROUND_NUMEL["cuda" if any(s.parameter.is_cuda for s in shards) else "cpu"]
        runs = choose_owners(find_runs(shards, self._heads, group))
        held = [part for number in range(len(shards)) for part, _ in self._own_parts(number)]
        self._rounds = [_Round(some, held, group) for some in divide_into_rounds(runs, round_numel)]

    @property
    def batches(self) -> list[MatrixBatch]:
        """Return batches of the matrices that this rank owns, in the order in which `replace` passes them to its function."""
        return [batch for one in self._rounds for batch in one.batches]

    @torch.no_grad()
    def replace(self, tensors: Sequence[Tensor], function: Function) -> None:
        """Replace every matrix M in `tensors` with `function` of M, in place. `function` sees whole matrices.

        Collective. tensors: gradients or momenta, one per shard, contiguous and laid out like `shard.data`.
        function(matrices, batch): maps `[batch.count, rows, columns]` to the same shape; called once per batch. `replace`
        does not synchronise with the device.
        """
        assert all(tensor.is_contiguous() for tensor in tensors), "pieces would be copies"
        if not self._rounds:
            return
        empty = tensors[0].new_empty(0, dtype=self._dtype)
        held = self._views(tensors)
        whole, arrive = self._rounds[0].gather(held, empty)
        return_previous: Callable[[], None] = _nothing
        for one, following in itertools.zip_longest(self._rounds, self._rounds[1:]):
            present, arrive_now = whole, arrive
            if following is not None:
                whole, arrive = following.gather(held, empty)
            arrive_now()
            results = [function(*pair) for pair in zip(present, one.batches, strict=True)]
            return_now = one.scatter(results, held, empty)
            return_previous()
            return_previous = return_now
        return_previous()

    def _views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return views of `tensors`, one for each of this rank's parts: `[count, rows, columns]`."""
        views = []
        for number, (shard, tensor) in enumerate(zip(self._shards, tensors, strict=True)):
            pieces = [piece for _, piece in shard.pieces(tensor)]
            for part, (piece, place) in self._own_parts(number):
                views.append(pieces[piece][place].view(part.count, *part.box.sizes))
        return views

    def _own_parts(self, number: int) -> Iterator[tuple[MatrixPart, tuple[int, slice]]]:
        shard = self._shards[number]
        return parts_of(shard.boxes, shard.global_shape, number, self._heads[number])


class _PartLocation(NamedTuple):
    """The location of a `MatrixPart` in a list of tensors `[n, rows, columns]`."""

    tensor: int
    matrices: slice
    rows: slice
    columns: slice

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[self.tensor][self.matrices, self.rows, self.columns]


class _Round:
    """One round: the transfers of the matrices of `runs` from their holders to their owners, and back."""

    def __init__(
        self, runs: Sequence[MatrixRun], held: Sequence[MatrixPart], group: dist.ProcessGroup | None
    ):
        me = 0 if group is None else group.rank()
        own = [run for run in runs if run.owner == me]
        shapes = dict.fromkeys(run.shape for run in own)
        self.batches = [
            MatrixBatch(shape, tuple(run for run in own if run.shape == shape)) for shape in shapes
        ]
        in_whole: dict[tuple[int, int], tuple[int, int]] = {}
        for index, batch in enumerate(self.batches):
            starts = itertools.accumulate((run.count for run in batch.runs), initial=0)
            in_whole |= {
                (run.number, run.first): (index, start)
                for run, start in zip(batch.runs, starts, strict=False)
            }
        in_held: dict[tuple[int, Box], list[tuple[int, int]]] = {}
        for index, part in enumerate(held):
            in_held.setdefault((part.number, part.box), []).append((part.first, index))

        def place_in_held(part: MatrixPart) -> _PartLocation:
            first, index = max(pair for pair in in_held[part.number, part.box] if pair[0] <= part.first)
            start = part.first - first
            return _PartLocation(index, slice(start, start + part.count), slice(None), slice(None))

        def place_in_whole(part: MatrixPart) -> _PartLocation:
            index, start = in_whole[part.number, part.first]
            (row, column), (rows, columns) = part.box.offsets, part.box.sizes
            matrices = slice(start, start + part.count)
            return _PartLocation(index, matrices, slice(row, row + rows), slice(column, column + columns))

        # Among thousands of ranks, each takes part in few transfers. But every rank must know whether the round has an
        # all-to-all.
        mine = [run for run in runs if me in run.holders.numels]
        to_owners = (transfer for run in mine for transfer in run.to_owner())
        to_holders = (transfer for run in mine for transfer in run.to_holders())
        gathers = any(not run.holders.have_all(run.owner) for run in runs)
        scatters = any(len(run.holders.numels) > 1 for run in runs)
        self._to_owners = _Exchange(to_owners, place_in_held, place_in_whole, group, gathers)
        self._to_holders = _Exchange(to_holders, place_in_whole, place_in_held, group, scatters)

    def gather(self, held: list[Tensor], empty: Tensor) -> tuple[list[Tensor], Callable[[], None]]:
        """Start the transfer to the owners.

        Return the whole matrices, one tensor per batch, and a function that completes the transfer. Collective.
        """
        whole = [empty.new_empty(batch.count, *batch.shape) for batch in self.batches]
        return whole, self._to_owners.start(held, whole, empty)

    def scatter(self, results: list[Tensor], held: list[Tensor], empty: Tensor) -> Callable[[], None]:
        """Start the transfer of results to the holders.

        Return a function that completes the transfer and the writes to `held`. Collective.
        """
        return self._to_holders.start(results, held, empty)


class _Exchange:
    """An all-to-all that moves parts of matrices between ranks.

    transfers: this rank's transfers, and possibly others, in the same order on all ranks. source: maps a part to its
    location in the tensors to read from. target: maps a part to its location in the tensors to write to. travels: True if
    any rank sends to another rank; equal on all ranks.
    """

    def __init__(
        self,
        transfers: Iterable[PartTransfer],
        source: Callable[[MatrixPart], _PartLocation],
        target: Callable[[MatrixPart], _PartLocation],
        group: dist.ProcessGroup | None,
        travels: bool,
    ):
        self._travels = travels
        self._group, me, ranks = group, *((0, 1) if group is None else (group.rank(), group.size()))
        to: list[list[MatrixPart]] = [[] for _ in range(ranks)]
        by: list[list[MatrixPart]] = [[] for _ in range(ranks)]
        for part, sender, receiver in transfers:
            if sender == me:
                to[receiver].append(part)
            if receiver == me:
                by[sender].append(part)
        self._kept = [(source(part), target(part)) for part in to[me]]
        to[me], by[me] = [], []
        # All-to-all needs its buffers in rank order: first the data for rank 0, then for rank 1, and so on.
        self._sends = [source(part) for part in itertools.chain(*to)]
        self._receives = [target(part) for part in itertools.chain(*by)]
        self._receive_numels = [part.numel for part in itertools.chain(*by)]
        self._numels_to = [sum(part.numel for part in parts) for parts in to]
        self._numels_by = [sum(part.numel for part in parts) for parts in by]

    def start(self, sources: list[Tensor], targets: list[Tensor], empty: Tensor) -> Callable[[], None]:
        """Start the transfer in the dtype of `empty`.

        Return a function that waits and completes the writes to `targets`. Collective.
        """
        if self._kept:
            read, write = ([pair[side] for pair in self._kept] for side in (0, 1))
            torch._foreach_copy_([p.of(targets) for p in write], [p.of(sources) for p in read])
        if not self._travels:
            return _nothing
        sent = (place.of(sources).reshape(-1).to(empty.dtype) for place in self._sends)
        outgoing = torch.cat([empty, *sent])
        incoming = empty.new_empty(sum(self._numels_by))
        work = dist.all_to_all_single(
            incoming, outgoing, self._numels_by, self._numels_to, group=self._group, async_op=True
        )

        # The default argument keeps the send buffer alive until the all-to-all is complete.
        def finish(_outgoing: Tensor = outgoing) -> None:
            work.wait()
            if self._receives:
                received = [place.of(targets) for place in self._receives]
                pieces = incoming.split(self._receive_numels)
                shaped = [piece.view_as(part) for piece, part in zip(pieces, received, strict=True)]
                torch._foreach_copy_(received, shaped)

        return finish


def _nothing() -> None: ...
