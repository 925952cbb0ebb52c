"""Where parameters lie in a contiguous buffer, and which elements of it each rank keeps: arithmetic only.

    buffer   | bucket 0                              | bucket 1                | ...
             | slot a        | slot b   | slot c  |..| slot d     | slot e  |..|       .. padding
    ranks    | rank 0      | rank 1      | rank 2    | rank 0 | rank 1 | rank 2 |

A slot is where one parameter lies. A bucket is sent in one collective and cut into equal parts, one for each rank, at
whatever element of whatever parameter that is. So padding is a few elements per bucket; nothing is padded to rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from forge.shard import Box

# Elements. Parameters begin at multiples of 64, so that every kernel may load them in its widest words; parts of ranks
# at multiples of 8, 16 bytes of bfloat16, the widest words of NCCL.
SLOT_ALIGNMENT = 64
PART_ALIGNMENT = 8


@dataclass(frozen=True)
class Item:
    """A parameter to be laid out; one that is `alone` shares its bucket with no other."""

    name: str
    numel: int
    alone: bool = False


@dataclass(frozen=True)
class Slot:
    """Elements [start, stop) of the buffer."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Elements [start, start + parts * part_numel) of the buffer."""

    start: int
    part_numel: int
    parts: int
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return self.parts * self.part_numel

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Piece:
    """What one rank keeps of one parameter: elements [start, stop) of it, flattened, from element `at` of its part on."""

    name: str
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class BufferLayout:
    """Buckets one after another, each cut into `parts` equal parts."""

    buckets: tuple[Bucket, ...]
    parts: int

    @property
    def numel(self) -> int:
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def part_numel(self) -> int:
        """Elements that one rank keeps of all buckets together."""
        return sum(bucket.part_numel for bucket in self.buckets)

    @cached_property
    def slots(self) -> dict[str, Slot]:
        return {slot.name: slot for bucket in self.buckets for slot in bucket.slots}

    def pieces(self, part: int) -> Iterator[Piece]:
        """What the rank that keeps part number `part` holds, in the order of the buffer; nothing of some parameters."""
        for bucket in self.buckets:
            begin = bucket.start + part * bucket.part_numel
            for slot in bucket.slots:
                start, stop = max(slot.start, begin), min(slot.stop, begin + bucket.part_numel)
                if start < stop:
                    yield Piece(slot.name, start - slot.start, stop - slot.start, start - begin)


def lay_out(items: Sequence[Item], *, parts: int, bucket_numel: int) -> BufferLayout:
    """The layout of `items` in their order. A bucket is closed once it holds `bucket_numel` elements; 0: one for all."""
    buckets: list[Bucket] = []
    start = 0
    for group in _divide(items, bucket_numel):
        slots, end = [], start
        for item in group:
            begin = round_up(end, SLOT_ALIGNMENT)
            end = begin + item.numel
            slots.append(Slot(item.name, begin, end))
        part_numel = round_up(-(-(end - start) // parts), PART_ALIGNMENT)
        buckets.append(Bucket(start, part_numel, parts, tuple(slots)))
        start = round_up(buckets[-1].stop, SLOT_ALIGNMENT)
    return BufferLayout(tuple(buckets), parts)


def default_bucket_numel(ranks: int) -> int:
    """Elements of a bucket that keeps a network of `ranks` busy: a ring has to be long enough for its latency.

    Megatron-Core's rule (DistributedDataParallelConfig.bucket_size).
    """
    return max(40_000_000, 1_000_000 * ranks)


def slice_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes of elements [start, stop) of a row-major tensor of `shape`, in that order: at most 2 * ndim - 1.

    Whole rows are one box; what is left before and after them is a slice of one row each, whose boxes are found alike.
    """
    if start >= stop:
        return
    if start == 0 and stop == prod(shape):
        yield Box((0,) * len(shape), tuple(shape))
        return
    row, rest = prod(shape[1:]), shape[1:]
    first, last = -(-start // row), stop // row
    if first > last:  # inside of one row
        yield from _in_row(last, rest, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(first - 1, rest, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *(0 for _ in rest)), (last - first, *rest))
    if last * row < stop:
        yield from _in_row(last, rest, 0, stop - last * row)


def _in_row(index: int, shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    for box in slice_boxes(shape, start, stop):
        yield Box((index, *box.offsets), (1, *box.sizes))


def _divide(items: Sequence[Item], bucket_numel: int) -> Iterator[list[Item]]:
    group: list[Item] = []
    numel = 0
    for item in items:
        if group and (item.alone or group[-1].alone or (bucket_numel and numel >= bucket_numel)):
            yield group
            group, numel = [], 0
        group.append(item)
        numel += item.numel
    if group:
        yield group


def round_up(number: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-number // unit) * unit
