"""Compare the tensors of all ranks with the reference, number by number.

The difference of a tensor is the largest difference of its elements, divided by the tensor's scale. The scale is the larger
of two numbers: the tensor's largest element, and a thousandth of the largest element in all tensors of its kind in the
step. The second number is for gradients that are exactly 0 in theory: their elements are rounding errors. Initial
parameters and restored checkpoints must be equal bit for bit.
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
# Kinds of the last step after a resume: from the layout's own checkpoint, and from another layout's checkpoint.
AGAIN = ("resumed", "continued")
# Kinds of tensors whose every element must be on some rank.
COMPLETE = ("initial", "gradient", "parameter", "optimizer", "router", "hooked", "saved", "loaded")


@dataclass(frozen=True)
class Difference:
    """The most different element of a tensor, on one rank.

    step: 0 for the initial parameters. rank: -1 if some element is on no rank; `found` and `expected` are then undefined.
    index: of the element in the global tensor. found, expected: the element's values on the rank and in the reference.
    size: the difference divided by the tensor's scale (see the module docstring). digest: True if `found` and `expected`
    are digests of the whole tensor.
    part: the rank's part of the global tensor; () if the rank has the whole tensor, or if its part is unknown.
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
        """The tensor in words, e.g. `gradient of layers.0.attention.wq.weight`."""
        return f"{self.kind} of {self.name}"


@dataclass
class Comparison:
    """The result of comparing tensors.

    differences: one per tensor above the tolerance. largest: kind -> largest difference. compared: number of tensors.
    counted: (step, tensor) -> number of its elements on all ranks; copies of an element count once.
    index_sums: (step, tensor) -> sum of the flat indices of the counted elements. If one element is missing and another is
    counted twice, the count is right but this sum is wrong.
    unplaced: names of tensors excluded from the comparison: activations whose place in the global tensor is unknown, hooks'
    curves that differ between runs, and tensors that only one of two checkouts has.
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
    """Compare one rank's recording with the reference. absolute: do not divide differences by the tensors' scales."""
    result = Comparison()
    for number, (whole, step) in enumerate(zip(reference.steps, record.steps, strict=True)):
        sizes = {key: largest(tensor) for key, tensor in whole.items()}
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
    """Merge the comparisons of all ranks. For each tensor, keep the rank with the largest difference.

    expected: the result of `elements`. A tensor also counts as different if some element is on no rank. This check covers
    only the kinds in COMPLETE, and of these only the recorded ones. Other kinds may be incomplete, e.g. module inputs.
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
        # A tensor without an entry has no element on any rank.
        counted = result.counted.get((step, key), 0)
        other = counted == number and result.index_sums.get((step, key), 0) != number * (number - 1) // 2
        if key[0] in COMPLETE and key[0] in kinds and (counted < number or other):
            worst[step, *key] = Difference(step, *key, -1, (), nan, nan, inf)
            result.largest[key[0]] = inf
    # Sort in the order of the model; the order of `worst` depends on the ranks.
    places = {(step, *key): place for place, (step, key) in enumerate(expected)}
    result.differences = [
        worst[name] for name in sorted(worst, key=lambda name: places.get(name, len(places)))
    ]
    return result


def elements(reference: WholeRecord) -> dict[tuple[int, TensorKey], int]:
    """Return a dict from (step, key) to the tensor's number of elements, for `merge`."""
    return {
        (number, key): tensor.numel()
        for number, step in enumerate(reference.steps)
        for key, tensor in step.items()
    }


def _held(
    whole: dict[TensorKey, Tensor], step: RankStep, result: Comparison
) -> dict[TensorKey, list[TensorPiece]]:
    """Return all pieces of a step on one rank, including module inputs and outputs.

    An input or output whose place in the global tensor is unknown is left out. Its name is added to `result.unplaced`.
    """
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
    """Return the largest difference over a tensor's pieces, or the first of several largest. Return `equal` if none differs.

    equal: a Difference of size 0 with the tensor's name and rank. expected: the whole tensor. scale: divides differences.
    NaN equals NaN and inf equals inf. A difference from a number is infinite.
    """
    worst = equal
    for piece in pieces:
        mine = part_of(expected, piece.place)
        values = piece.values.to(mine.dtype)
        if not mine.numel() or torch.equal(values, mine):
            continue
        apart = (values - mine).abs().double()
        apart = torch.where(apart.isnan(), inf, apart)
        apart = torch.where((values == mine) | (values.isnan() & mine.isnan()), 0.0, apart).flatten()
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
    """Compare the last step after a resume from the run's checkpoint with the last step of the uninterrupted run.

    Yield one Difference per piece that differs.
    """
    last = record.steps[-1].pieces
    for (kind, name), pieces in last.items():
        if kind != "resumed":
            continue
        for now, then in zip(pieces, last[_first_time((kind, name))], strict=True):
            here = tuple(slice(0, size) for size in then.values.shape)
            equal = Difference(len(record.steps) - 1, kind, name, rank, (), 0.0, 0.0, 0.0)
            found = difference_of(
                equal, then.values, [TensorPiece(now.values, here)], largest(then.values) or 1.0
            )
            if found is not equal:
                yield replace(found, index=global_index(then.place, found.index), part=then.place)


def _first_time(key: TensorKey) -> TensorKey:
    """Map the key of a tensor in the last step after a resume to its key in the uninterrupted last step.

    E.g. ("resumed", "gradient NAME") becomes ("gradient", NAME). Other keys are returned unchanged.
    """
    kind, _, name = key[1].partition(" ")
    return (kind, name) if key[0] in AGAIN else key


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value of the finite elements; 0 without one."""
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0
