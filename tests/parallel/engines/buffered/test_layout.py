"""Every parameter element has one place and one owner rank, with almost no padding."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.parallel.engines.buffered.plan import (
    PART_ALIGNMENT,
    SLOT_ALIGNMENT,
    Bucket,
    BufferItem,
    default_bucket_numel,
    lay_out,
    slice_boxes,
)

ITEMS = st.lists(st.tuples(st.integers(1, 700), st.booleans()), min_size=1, max_size=12).map(
    lambda drawn: [BufferItem(f"p{i}", numel, alone) for i, (numel, alone) in enumerate(drawn)]
)
PARTS = st.integers(1, 9)
BUCKET_NUMEL = st.sampled_from([0, 1, 100, 1000])
LAYOUTS = st.builds(
    lambda items, parts, numel: (items, parts, lay_out(items, parts=parts, bucket_numel=numel)),
    ITEMS,
    PARTS,
    BUCKET_NUMEL,
)

Case = tuple[list[BufferItem], int, tuple[Bucket, ...]]


@given(LAYOUTS)
def test_slots_are_aligned_in_order_and_never_overlap(case: Case) -> None:
    items, parts, buckets = case
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert [(slot.name, slot.stop - slot.start) for slot in slots] == [(i.name, i.numel) for i in items]
    end = 0
    for slot in slots:
        assert slot.start >= end and slot.start % SLOT_ALIGNMENT == 0
        end = slot.stop


@given(LAYOUTS)
def test_buckets_cover_their_slots_and_follow_each_other(case: Case) -> None:
    _, _, buckets = case
    end = 0
    for bucket in buckets:
        assert bucket.start >= end and bucket.start % SLOT_ALIGNMENT == 0
        assert bucket.part_numel % PART_ALIGNMENT == 0
        assert all(bucket.start <= slot.start and slot.stop <= bucket.stop for slot in bucket.slots)
        end = bucket.stop


@given(LAYOUTS)
def test_padding_is_a_few_elements_per_bucket(case: Case) -> None:
    _, _, buckets = case
    for bucket in buckets:
        used = bucket.slots[-1].stop - bucket.start
        assert bucket.numel - used < bucket.parts * PART_ALIGNMENT
        assert used - sum(slot.stop - slot.start for slot in bucket.slots) < SLOT_ALIGNMENT * len(
            bucket.slots
        )


@given(LAYOUTS)
def test_the_parts_of_all_ranks_cover_every_element_once(case: Case) -> None:
    items, parts, buckets = case
    seen = {item.name: [0] * item.numel for item in items}
    for part, bucket in itertools.product(range(parts), buckets):
        end = 0
        for slot in bucket.slots:
            start, stop, at = bucket.kept(slot, part)
            if start == stop:
                continue
            # In order within this rank's part, and at the slot's place in the buffer.
            assert at >= end
            end = at + stop - start
            assert end <= bucket.part_numel
            assert bucket.start + part * bucket.part_numel + at == slot.start + start
            for element in range(start, stop):
                seen[slot.name][element] += 1
    assert all(count == 1 for counts in seen.values() for count in counts)


@given(LAYOUTS)
def test_a_lone_item_has_its_own_bucket(case: Case) -> None:
    items, parts, buckets = case
    alone = {item.name for item in items if item.alone}
    for bucket in buckets:
        assert len(bucket.slots) == 1 or alone.isdisjoint(slot.name for slot in bucket.slots)


@given(ITEMS, PARTS)
def test_a_bucket_is_closed_once_it_is_full(items: list[BufferItem], parts: int) -> None:
    buckets = lay_out(items, parts=parts, bucket_numel=500)
    for bucket in buckets:
        sizes = [slot.stop - slot.start for slot in bucket.slots]
        assert sum(sizes[:-1]) < 500
    plain = [BufferItem(item.name, item.numel) for item in items]
    assert len(lay_out(plain, parts=parts, bucket_numel=0)) == 1
    assert len(lay_out(plain, parts=parts, bucket_numel=1)) == len(items)


@given(ITEMS, BUCKET_NUMEL)
def test_the_cut_of_a_lone_item_does_not_depend_on_earlier_items(items, numel) -> None:
    # Both ends of a pipeline must cut a tied embedding identically, whatever else their buffers contain.
    tied = BufferItem("tied", 1234, alone=True)
    parts = 4
    first = lay_out([*items, tied], parts=parts, bucket_numel=numel)
    alone = lay_out([tied], parts=parts, bucket_numel=numel)

    def kept(buckets: tuple[Bucket, ...]) -> list[tuple[int, int]]:
        bucket = buckets[-1]
        return [bucket.kept(bucket.slots[-1], part)[:2] for part in range(parts)]

    assert kept(first) == kept(alone)


@pytest.mark.parametrize(("ranks", "numel"), [(1, 40_000_000), (40, 40_000_000), (128, 128_000_000)])
def test_the_default_size_of_a_bucket_grows_with_the_ranks(ranks: int, numel: int) -> None:
    assert default_bucket_numel(ranks) == numel


@settings(max_examples=300)
@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_a_slice_is_a_few_boxes_in_memory_order(shape: list[int], data) -> None:
    full = torch.arange(prod(shape)).view(shape)
    start = data.draw(st.integers(0, full.numel()))
    stop = data.draw(st.integers(start, full.numel()))
    boxes = list(slice_boxes(shape, start, stop))
    elements = [
        full[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].reshape(-1)
        for box in boxes
    ]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *elements]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
