"""Compare the tensors of all ranks with the reference, number by number.

The difference of a tensor is the largest difference of its elements, divided by the tensor's size. The size is its largest
element, or a thousandth of the largest element of all tensors of its kind in the step, if that is more: the rounding errors
of a gradient that should be 0 have no meaningful size. Initial parameters and restored checkpoints must be equal bit for
bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan

import torch
from torch import Tensor

from forge.tools.verify.pieces import TensorKey, TensorPiece, TensorPlace, global_index, index_sum, part_of
from forge.tools.verify.record import RankRecord, RankStep, WholeRecord

TOLERANCE, FLOOR = 1e-9, 1e-3
EXACT = ("initial", "loaded", "resumed")
# Kinds of the last step, repeated from a checkpoint: the layout's own, and another layout's.
AGAIN = ("resumed", "continued")
# The ranks together must hold every element of tensors of these kinds.
COMPLETE = ("initial", "gradient", "parameter", "optimizer", "router", "hooked", "saved", "loaded")


@dataclass(frozen=True)
class Difference:
    """The largest difference of one tensor, on one rank.

    step: 0 for the initial parameters. index: in the global tensor. size: the difference divided by the largest
    element of the whole tensor, or by FLOOR times the largest element of all tensors of its kind, if that is more.
    If some element is on no rank, rank is -1 and `found` is NaN. digest: the numbers are digests of the whole
    tensor. part: the rank's part of the global tensor; () if it has all of it, or if the part is unknown.
    """

    step: int
    kind: str
    name: str
    rank: int
    index: tuple[int, ...]
    found: float
    expected: float
    size: float
    digest: bool = False
    part: TensorPlace = ()

    @property
    def what(self) -> str:
        """Such as `gradient of layers.0.attention.wq.weight`."""
        return f"{self.kind} of {self.name}"


@dataclass
class Comparison:
    """The result of comparing tensors.

    differences: one per tensor above the tolerance. largest: the largest difference by kind. compared: number of tensors.
    counted: number of elements of each tensor on the ranks, without copies. index_sums: sum of the flat indices of these
    elements, because a duplicate element could hide a missing one in the count. unplaced: tensors that cannot be compared:
    activations whose place does not follow from shapes, and curves of hooks that differ between runs.
    """

    differences: list[Difference] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    compared: int = 0
    counted: dict[tuple[int, TensorKey], int] = field(default_factory=dict)
    index_sums: dict[tuple[int, TensorKey], int] = field(default_factory=dict)
    unplaced: set[str] = field(default_factory=set)


def compare_rank(
    reference: WholeRecord,
    rank: int,
    record: RankRecord,
    tolerance: float = TOLERANCE,
    *,
    absolute: bool = False,
) -> Comparison:
    """Compare one rank's recording with the reference. absolute: do not divide differences by the tensors' sizes."""
    result = Comparison()
    for number, (whole, step) in enumerate(zip(reference.steps, record.steps, strict=True)):
        sizes = {key: _largest(tensor) for key, tensor in whole.items()}
        floors: dict[str, float] = defaultdict(float)
        for (kind, _), size in sizes.items():
            floors[kind] = max(floors[kind], FLOOR * size)
        for key, pieces in _held(whole, step, result).items():
            if key[0] == "resumed":
                continue
            same = _first_time(key)
            if same not in whole:
                result.unplaced.add(key[1])
                continue
            scale = 1.0 if absolute else max(sizes[same], floors[same[0]])
            found = difference_of(
                Difference(number, *key, rank, (), 0.0, 0.0, 0.0), whole[same], pieces, scale or 1.0
            )
            result.compared += 1
            result.largest[key[0]] = max(result.largest.get(key[0], 0.0), found.size)
            counted = [piece for piece in pieces if piece.counted]
            result.counted[number, key] = sum(piece.values.numel() for piece in counted)
            shape = whole[same].shape
            result.index_sums[number, key] = sum(index_sum(piece.place, shape) for piece in counted)
            if not found.size <= (0.0 if key[0] in EXACT else tolerance):
                result.differences.append(found)
    result.differences += _resumed(rank, record)
    return result


def merge(comparisons: Sequence[Comparison], expected: dict[tuple[int, TensorKey], int]) -> Comparison:
    """Return the comparison over all ranks. For each tensor, keep the rank with the largest difference.

    expected: number of elements of each tensor of the reference, by step and key. If some elements of a tensor are
    on no rank, that counts as a difference. Two sorts of kinds are exempt: kinds outside of COMPLETE, because not
    every layout has an activation at each border, and kinds of which no rank has any tensor.
    """
    result = Comparison()
    worst: dict[tuple[int, str, str], Difference] = {}
    for one in comparisons:
        result.unplaced |= one.unplaced
        result.compared += one.compared
        for kind, size in one.largest.items():
            result.largest[kind] = max(result.largest.get(kind, 0.0), size)
        for place, number in one.counted.items():
            result.counted[place] = result.counted.get(place, 0) + number
            result.index_sums[place] = result.index_sums.get(place, 0) + one.index_sums[place]
        for found in one.differences:
            name = found.step, found.kind, found.name
            if name not in worst or found.size > worst[name].size:
                worst[name] = found
    kinds = {key[0] for _, key in result.counted}
    for (step, key), number in expected.items():
        # Without an entry, no rank has counted an element of the tensor.
        counted = result.counted.get((step, key), 0)
        other = counted == number and result.index_sums.get((step, key), 0) != number * (number - 1) // 2
        if key[0] in COMPLETE and key[0] in kinds and (counted < number or other):
            worst[step, *key] = Difference(step, *key, -1, (), nan, nan, inf)
            result.largest[key[0]] = inf
    # In the order of the model, not of the ranks.
    places = {(step, *key): place for place, (step, key) in enumerate(expected)}
    result.differences = [
        worst[name] for name in sorted(worst, key=lambda name: places.get(name, len(places)))
    ]
    return result


def elements(reference: WholeRecord) -> dict[tuple[int, TensorKey], int]:
    """Return the number of elements of each tensor by step and key, for `merge`."""
    return {
        (number, key): tensor.numel()
        for number, step in enumerate(reference.steps)
        for key, tensor in step.items()
    }


def _held(
    whole: dict[TensorKey, Tensor], step: RankStep, result: Comparison
) -> dict[TensorKey, list[TensorPiece]]:
    """Return all pieces of a step on one rank, including activations at borders."""
    held: dict[TensorKey, list[TensorPiece]] = defaultdict(list, step.pieces)
    for one in step.seen:
        key = ("output" if one.output else "input", one.name)
        expected = whole.get(key)
        place = (
            None
            if expected is None or step.part is None
            else step.part.place(one.row, one.values.shape, expected.shape)
        )
        if place is None:
            result.unplaced.add(one.name)
        else:
            held[key].append(TensorPiece(one.values, place))
    return held


def difference_of(
    equal: Difference, expected: Tensor, pieces: Sequence[TensorPiece], scale: float
) -> Difference:
    """Return the largest difference over a tensor's pieces, the first among equals. Return `equal` if no element differs."""
    worst = equal
    for piece in pieces:
        mine = part_of(expected, piece.place)
        values = piece.values.to(mine.dtype)
        if not mine.numel() or torch.equal(values, mine):
            continue
        apart = (values - mine).abs().double()
        apart = torch.where(apart.isnan(), inf, apart).flatten()
        place = int(apart.argmax())
        size = apart[place].item() / scale
        if size > worst.size:
            local = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), mine.shape))
            index = global_index(piece.place, local)
            found, wanted = values.flatten()[place].item(), mine.flatten()[place].item()
            part = () if mine.shape == expected.shape else piece.place
            worst = replace(equal, index=index, found=found, expected=wanted, size=size, part=part)
    return worst


def _resumed(rank: int, record: RankRecord) -> Iterator[Difference]:
    """Yield the differences between resuming from this layout's own checkpoint and continuing without a stop."""
    last = record.steps[-1].pieces
    for (kind, name), pieces in last.items():
        if kind != "resumed":
            continue
        for now, then in zip(pieces, last[_first_time((kind, name))], strict=True):
            here = tuple(slice(0, size) for size in then.values.shape)
            equal = Difference(len(record.steps) - 1, kind, name, rank, (), 0.0, 0.0, 0.0)
            found = difference_of(
                equal, then.values, [TensorPiece(now.values, here)], _largest(then.values) or 1.0
            )
            if found is not equal:
                yield replace(found, index=global_index(then.place, found.index), part=then.place)


def _first_time(key: TensorKey) -> TensorKey:
    """Map the key of a tensor of the repeated last step to the key of the same tensor in the original last step.

    The repeated step is the one after a resume. Other keys are returned unchanged.
    """
    kind, _, name = key[1].partition(" ")
    return (kind, name) if key[0] in AGAIN else key


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
