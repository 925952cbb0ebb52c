"""Digests: three numbers per tensor. A small file of digests from one process can check a run on many ranks.

The first two numbers are inner products of the tensor with two pseudo-random tensors, whose elements depend only on their
global index. Each rank digests its own elements, so the sum over ranks does not depend on the layout. The relative
difference of two digests is about the relative difference of the tensors. The third number is the sum of the tensor's
squared elements, a measure of its size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan, prod, sqrt
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from forge.runtime.errors import UserError
from forge.tools.verify.compare import COMPLETE, FLOOR, Comparison, Difference
from forge.tools.verify.pieces import TensorKey, TensorPiece, TensorPlace
from forge.tools.verify.record import RankRecord, WholeRecord

NUMBERS = 2
_BITS = 0xFFFFFFFF

Digest: TypeAlias = list[float]
# A rank's digests of one step: tensor -> place of the piece, as text -> (number of elements, digest of the piece).
Held: TypeAlias = dict[TensorKey, dict[str, tuple[int, Digest]]]


@dataclass(frozen=True)
class Expected:
    """The digests of a run in one process. text: the run's configuration. order: modules in computation order.

    steps: one dict per step, tensor -> (shape, digest). steps[0] has the initial parameters.
    """

    text: str
    order: list[str]
    steps: list[dict[TensorKey, tuple[tuple[int, ...], Digest]]]

    @classmethod
    def of(cls, text: str, record: WholeRecord) -> Expected:
        """Return the digests of `record`, the recording of one process with the configuration `text`."""
        steps = [
            {
                key: (tuple(tensor.shape), digest(tensor, tuple(slice(0, size) for size in tensor.shape)))
                for key, tensor in step.items()
            }
            for step in record.steps
        ]
        return cls(text, record.order, steps)

    def write(self, file: Path) -> None:
        """Write the digests to `file`. Raises UserError if `file` is not writable."""
        try:
            torch.save(vars(self), file)
        except (OSError, RuntimeError) as error:
            raise UserError(f"--digests {file}: cannot be written: {error}") from None

    @classmethod
    def read(cls, file: Path) -> Expected:
        """Read digests from a file written by `write`. Raises UserError for any other file."""
        try:
            found: Any = torch.load(file, weights_only=True)
            return cls(found["text"], found["order"], found["steps"])
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(f"--digests {file}: is not a file of digests ({problem})") from None


def digest(values: Tensor, place: TensorPlace) -> Digest:
    """Return the digest of `values`, the piece of a global tensor at `place`.

    A digest has NUMBERS inner products of `values` with fixed random weights, and the sum of squares.
    """
    values = values.double()
    found = []
    for number in range(NUMBERS):
        rest = values
        for dim in reversed(range(values.ndim)):
            rest = rest @ _weights(place[dim], NUMBERS * dim + number)
        found.append(rest.item())
    return [*found, values.square().sum().item()]


def held_by(record: RankRecord, expected: Expected) -> list[Held]:
    """Return the digests of a rank's recording: one Held per step.

    Activations whose place in the global tensor is unknown are left out.
    """
    steps: list[Held] = []
    for step, wholes in zip(record.steps, expected.steps, strict=True):
        pieces: dict[TensorKey, list[TensorPiece]] = defaultdict(list, step.pieces)
        for one in step.seen:
            key = ("output" if one.output else "input", one.name)
            if key in wholes and step.part is not None:
                place = step.part.place(one.row, one.values.shape, torch.Size(wholes[key][0]))
                if place is not None:
                    pieces[key].append(TensorPiece(one.values, place))
        steps.append(
            {
                key: {repr(one.place): (one.values.numel(), digest(one.values, one.place)) for one in found}
                for key, found in pieces.items()
                if key in wholes
            }
        )
    return steps


def compare_digests(expected: Expected, ranks: Sequence[list[Held]], tolerance: float) -> Comparison:
    """Compare the digests of all ranks with the digests of one process.

    The copies of a piece on several ranks must also agree with each other. A Difference has no index, because a digest
    covers the whole tensor.
    """
    result = Comparison()
    for number, wholes in enumerate(expected.steps):
        floors: dict[str, float] = defaultdict(float)
        for (kind, _), (_, numbers) in wholes.items():
            if isfinite(numbers[-1]):
                floors[kind] = max(floors[kind], FLOOR * sqrt(numbers[-1]))
        for key, (shape, wanted) in wholes.items():
            pieces = list(_pieces(key, [rank[number] for rank in ranks]))
            elements = sum(elements for _, _, elements, _ in pieces)
            if elements != prod(shape):
                # Layouts may lack an activation at some borders, so only kinds of COMPLETE count as different.
                if key[0] in COMPLETE:
                    result.differences.append(Difference(number, *key, -1, (), 0.0, 0.0, inf))
                elif pieces:
                    result.unplaced.add(key[1])
                continue
            scale = max(sqrt(wanted[-1]) if isfinite(wanted[-1]) else 0.0, floors[key[0]]) or 1.0
            found = [sum(numbers) for numbers in zip(*(one for _, _, _, one in pieces), strict=True)]
            apart = [_apart(*both) / scale for both in zip(found, wanted[:NUMBERS], strict=False)]
            size, worst = max((size, place) for place, size in enumerate(apart))
            rank = next((rank for rank, copies, _, _ in pieces if copies > tolerance * scale), None)
            result.compared += 1
            result.largest[key[0]] = max(result.largest.get(key[0], 0.0), size)
            if size > tolerance or rank is not None:
                result.differences.append(
                    Difference(number, *key, rank or 0, (), found[worst], wanted[worst], size, digest=True)
                )
    return result


def _apart(mine: float, theirs: float) -> float:
    """Return the difference of two numbers. NaN equals NaN and inf equals inf. A difference from a number is infinite."""
    if mine == theirs or (isnan(mine) and isnan(theirs)):
        return 0.0
    return inf if isnan(mine - theirs) else abs(mine - theirs)


def _pieces(key: TensorKey, ranks: Sequence[Held]) -> Iterator[tuple[int, float, int, Digest]]:
    """Yield (rank, difference, number of elements, digest) for every distinct piece of the tensor `key`.

    Several ranks may have copies of a piece. digest: of the first copy. rank: the rank whose copy differs most from the
    first copy. difference: between the digests of these two copies.
    """
    found: dict[str, tuple[int, float, int, Digest]] = {}
    for rank, held in enumerate(ranks):
        for place, (elements, numbers) in held.get(key, {}).items():
            if place not in found:
                found[place] = rank, 0.0, elements, numbers
                continue
            _, most, _, first = found[place]
            pairs = zip(numbers[:-1], first[:-1], strict=True)
            apart = max(_apart(*both) for both in pairs)
            if apart > most:
                found[place] = rank, apart, elements, first
    yield from found.values()


def _weights(place: slice | tuple[int, ...], seed: int) -> Tensor:
    """Return a pseudo-random number for each index in `place`, float64 `[indices]`: a hash of the index and `seed`.

    The numbers have variance 1. place: indices of one dim of a global tensor.
    """
    indices = range(place.start, place.stop) if isinstance(place, slice) else place
    x = torch.tensor(list(indices), dtype=torch.int64) + (seed + 1) * 0x9E3779B1
    for factor, shift in ((0x85EBCA6B, 15), (0xC2B2AE35, 13), (0x27D4EB2F, 16)):
        x = ((x ^ (x >> shift)) * factor) & _BITS
    return (x.double() / 2**31 - 1) * sqrt(3.0)
