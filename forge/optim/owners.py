"""Find the ranks that hold parts of each matrix (its holders), and choose its owner.

The owner is the holder that computes on the whole matrix.

Owners are chosen to balance the work over all ranks. An owner computes in several rounds, to limit its memory.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from forge.optim.optimizer import gather_shard_boxes
from forge.shard import Box, Shard


@dataclass(frozen=True)
class MatrixPart:
    """A rank's part of consecutive matrices of one shard.

    number: index of the shard. first, count: index of the first matrix within the shard, and the number of matrices.
    box: the rows and columns of the part in each matrix.
    """

    number: int
    first: int
    count: int
    box: Box

    @property
    def numel(self) -> int:
        return self.count * self.box.numel


PartTransfer: TypeAlias = tuple[MatrixPart, int, int]
"""(part, source rank, destination rank)"""


class Holders:
    """The ranks holding a matrix.

    of_box: box of the matrix -> ranks holding the box, in the same order on all ranks. numels: rank -> number of elements
    that it holds.
    """

    def __init__(self, of_box: dict[Box, list[int]]):
        self.of_box = of_box
        numels: Counter[int] = Counter()
        for box, ranks in of_box.items():
            numels.update(dict.fromkeys(ranks, box.numel))
        self.numels = dict(numels)

    @cached_property
    def preferred(self) -> np.ndarray:
        """Return the ranks, int64 `[ranks]`, sorted by number of held elements (descending), then by rank."""
        return np.array(sorted(self.numels, key=lambda rank: (-self.numels[rank], rank)))

    def have_all(self, rank: int) -> bool:
        """Return whether `rank` holds the whole matrix."""
        return self.numels.get(rank, 0) == sum(box.numel for box in self.of_box)


@dataclass(frozen=True)
class MatrixRun:
    """Consecutive matrices of shard `number` with the same holders and one owner."""

    number: int
    first: int
    count: int
    shape: tuple[int, ...]
    holders: Holders
    owner: int = -1

    @property
    def numel(self) -> int:
        """Return the number of elements of one matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def work(self) -> int:
        """Return the number of multiplications in one orthogonalisation step of all matrices of the run.

        A step computes the Gram matrix, its square, and one product with the matrix.
        """
        short, long = sorted(self.shape)
        return self.count * short * short * (2 * long + short)

    def to_owner(self) -> Iterator[PartTransfer]:
        for box, holders in self.holders.of_box.items():
            # Prefer the owner's own copy. Otherwise choose different ranks for different owners.
            source = self.owner if self.owner in holders else holders[self.owner % len(holders)]
            yield MatrixPart(self.number, self.first, self.count, box), source, self.owner

    def to_holders(self) -> Iterator[PartTransfer]:
        for box, holders in self.holders.of_box.items():
            for holder in holders:
                yield MatrixPart(self.number, self.first, self.count, box), self.owner, holder


def parts_of(
    boxes: Sequence[Box], shape: torch.Size, number: int, heads: int
) -> Iterator[tuple[MatrixPart, tuple[int, slice]]]:
    """Yield (part, location) for each part of a matrix in `boxes`.

    location: (index into `boxes`, slice of that box's first dimension). number: index of the shard. shape: the shard's
    global shape. heads: number of matrices into which the rows of a 2-D shard are divided.
    """
    for piece, box in enumerate(boxes):
        if len(shape) == 3:
            inner = Box(box.offsets[1:], box.sizes[1:])
            yield MatrixPart(number, box.offsets[0], box.sizes[0], inner), (piece, slice(None))
            continue
        height = shape[0] // heads
        (begin, column), (size, columns) = box.offsets, box.sizes
        end = begin + size
        # A box may begin and end within a head, with whole heads in between.
        inside = {-(-begin // height) * height, end // height * height}
        edges = sorted({begin, end, *(edge for edge in inside if begin < edge < end)})
        for start, stop in itertools.pairwise(edges):
            first = start // height
            count = max(1, (stop - start) // height)
            inner = Box((start - first * height, column), ((stop - start) // count, columns))
            yield MatrixPart(number, first, count, inner), (piece, slice(start - begin, stop - begin))


def find_runs(
    shards: Sequence[Shard], heads: Sequence[int], group: dist.ProcessGroup | None
) -> list[MatrixRun]:
    """Return runs of consecutive matrices of `shards` with the same holders, in order. Collective.

    The runs have no owners yet; `choose_owners` sets them.
    """
    everyones = gather_shard_boxes(shards, group)
    runs = []
    for number, (shard, number_of_heads) in enumerate(zip(shards, heads, strict=True)):
        *stack, rows, columns = shard.global_shape
        shape = rows // number_of_heads, columns
        assert len(stack) <= 1 and not rows % number_of_heads and not (stack and number_of_heads > 1), (
            shard.name
        )
        ranks_with: dict[tuple[Box, ...], list[int]] = {}
        for rank, of_rank in enumerate(everyones):
            ranks_with.setdefault(of_rank[number], []).append(rank)
        parts = [
            (part, ranks)
            for boxes, ranks in ranks_with.items()
            for part, _ in parts_of(boxes, shard.global_shape, number, number_of_heads)
        ]
        edges = sorted({edge for part, _ in parts for edge in (part.first, part.first + part.count)})
        held: list[dict[Box, list[int]]] = [{} for _ in edges]
        for part, ranks in parts:
            for index in range(
                bisect_left(edges, part.first), bisect_right(edges, part.first + part.count) - 1
            ):
                held[index].setdefault(part.box, []).extend(ranks)
        for (first, end), holders in zip(itertools.pairwise(edges), held, strict=False):
            in_order = {box: sorted(ranks) for box, ranks in holders.items()}
            run = MatrixRun(number, first, end - first, shape, Holders(in_order))
            assert sum(box.numel for box in in_order) == run.numel, (
                f"{shard.name}: copies are cut in different places"
            )
            runs.append(run)
    return runs


def choose_owners(runs: Sequence[MatrixRun]) -> list[MatrixRun]:
    """Divide each run into at most one piece per holder, and choose an owner for each piece.

    Not collective. Pieces with the most work are assigned first, each to the holder with the least work so far.
    """
    divided = []
    for run in runs:
        ways = min(run.count, len(run.holders.numels))
        edges = [run.count * way // ways for way in range(ways + 1)]
        divided += [
            replace(run, first=run.first + start, count=stop - start)
            for start, stop in itertools.pairwise(edges)
        ]
    ranks = 1 + max((rank for run in runs for rank in run.holders.numels), default=0)
    given = np.zeros(ranks, dtype=np.int64)  # work by rank
    owners = {}
    for run in sorted(divided, key=lambda run: -run.work):
        candidates = run.holders.preferred
        owner = int(candidates[given[candidates].argmin()])  # the first of the least loaded
        given[owner] += run.work
        owners[run.number, run.first] = owner
    return [replace(run, owner=owners[run.number, run.first]) for run in divided]


def divide_into_rounds(runs: Sequence[MatrixRun], round_numel: int) -> list[list[MatrixRun]]:
    """Divide runs into rounds. In each round an owner has at most `round_numel` elements, or a single larger matrix."""
    rounds: list[list[MatrixRun]] = []
    current: Counter[int] = Counter()  # owner -> its latest round
    filled: Counter[int] = Counter()  # owner -> elements in its latest round
    for run in runs:
        owner, first, end = run.owner, run.first, run.first + run.count
        while first < end:
            room = (round_numel - filled[owner]) // run.numel
            if filled[owner] and room < 1:
                current[owner] += 1
                filled[owner] = 0
                continue
            count = min(end - first, max(1, room))
            if current[owner] == len(rounds):
                rounds.append([])
            rounds[current[owner]].append(replace(run, first=first, count=count))
            filled[owner] += count * run.numel
            first += count
    return rounds
