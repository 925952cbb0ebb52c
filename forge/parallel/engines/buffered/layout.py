"""Positions of parameters in a contiguous buffer, and the elements owned by each rank: arithmetic only.

    buffer   | bucket 0                              | bucket 1                | ...
             | slot a        | slot b   | slot c  |..| slot d     | slot e  |..|       .. padding
    ranks    | rank 0      | rank 1      | rank 2    | rank 0 | rank 1 | rank 2 |

A slot holds one parameter. A bucket is sent in one collective and cut into equal parts, one per rank, at any element of
any parameter. So padding is a few elements per bucket; rows are not padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from forge.shard import Box

# In elements. Parameters begin at multiples of 64, so kernels can use their widest loads. Parts of ranks begin at
# multiples of 8: 16 bytes of bfloat16, NCCL's widest load.
SLOT_ALIGNMENT = 64
PART_ALIGNMENT = 8


@dataclass(frozen=True)
class BufferItem:
    """A parameter to place in the buffer. alone: True to give the parameter a bucket of its own."""

    name: str
    numel: int
    alone: bool = False


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: elements [start, stop) of the buffer."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Elements [start, start + parts * part_numel) of the buffer, sent in one collective. Each rank has one part."""

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

    def kept(self, slot: Slot, part: int) -> tuple[int, int, int]:
        """Return (start, stop, at): the elements of `slot` on the rank with part number `part` of the bucket.

        The rank holds elements [start, stop) of the flattened parameter. They begin at element `at` of the rank's part of
        the bucket. (0, 0, 0): the rank holds none.
        """
        begin = self.start + part * self.part_numel
        start, stop = max(slot.start, begin), min(slot.stop, begin + self.part_numel)
        return (start - slot.start, stop - slot.start, start - begin) if start < stop else (0, 0, 0)


def lay_out(items: Sequence[BufferItem], *, parts: int, bucket_numel: int) -> tuple[Bucket, ...]:
    """Lay out `items` in order. A bucket is closed when it has `bucket_numel` elements or more; 0: one bucket for all.

    parts: number of ranks that share a bucket.
    """
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
    return tuple(buckets)


def default_bucket_numel(ranks: int) -> int:
    """Return a bucket size, in elements, large enough to hide the latency of a ring of `ranks` ranks.

    The rule is Megatron-Core's (DistributedDataParallelConfig.bucket_size).
    """
    return max(40_000_000, 1_000_000 * ranks)


def slice_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that cover elements [start, stop) of a row-major tensor of `shape`, in row-major order.

    All whole rows form one box. The partial rows before and after them are cut recursively. There are at most
    2 * ndim - 1 boxes.
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


def flat_boxes(local: Box, start: int, stop: int) -> tuple[Box, ...]:
    """Return elements [start, stop) of the flattened box `local` as boxes of the global tensor."""
    return tuple(
        Box(tuple(a + b for a, b in zip(local.offsets, box.offsets, strict=True)), box.sizes)
        for box in slice_boxes(local.sizes, start, stop)
    )


def _divide(items: Sequence[BufferItem], bucket_numel: int) -> Iterator[list[BufferItem]]:
    group: list[BufferItem] = []
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
    """Return the smallest multiple of `unit` that is at least `number`."""
    return -(-number // unit) * unit
