"""The order of samples across changes of mixture and skipped samples. train/test_state.py has random histories."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.data.dataset import PackedDataset
from forge.data.order import Order, SkippedRange, merge, nth_outside, numbered
from forge.runtime.errors import UserError
from tests.support.streams import GLOBAL, Numbers, first_batches, make_dataset

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=4)


def data(**weights: float) -> PackedDataset:
    """Return sources of 10, 100 or 1000 windows, by the last letter of their name: s, m, l."""
    sizes = {"s": 10, "m": 100, "l": 1000}
    sources = [Numbers(name, sizes[name[-1]]) for name in weights]
    return PackedDataset(sources, list(weights.values()), 1, seed=3, block=16)


def read(dataset: PackedDataset, first: int, count: int) -> list[tuple[str, int, int]]:
    return [dataset.locate(sample) for sample in range(first, first + count)]


@given(RANGES, st.integers(0, 70))
def test_the_nth_kept_number_lies_outside_the_ranges(ranges, position) -> None:
    left = [i for i in range(position, 300) if not any(first <= i < end for first, end in ranges)]
    assert [nth_outside(position, n, merge(ranges)) for n in range(100)] == left[:100]


@given(RANGES, st.integers(0, 70), st.integers(0, 40), st.integers(0, 40))
def test_reading_in_two_parts_equals_reading_at_once(ranges, position, some, more) -> None:
    gaps = merge(ranges)
    stopped = nth_outside(position, some, gaps)
    assert nth_outside(stopped, more, gaps) == nth_outside(position, some + more, gaps)


def test_merged_ranges_are_sorted_and_apart() -> None:
    assert merge([(40, 50), (8, 16), (16, 20), (12, 14), (5, 5)]) == ((8, 20), (40, 50))


@given(
    weights=st.lists(st.sampled_from([0.1, 0.3, 1.0, 2.5]), min_size=1, max_size=3),
    ranges=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=3),
)
def test_under_one_mixture_skipping_removes_only_the_skipped_samples(weights, ranges) -> None:
    """All other samples stay the same."""
    order = Order.beginning(1, numbered("x" * len(weights)), weights, block=16)
    spans = [(first, first + length) for first, length in ranges]
    without = order.passing_over([SkippedRange(*span, order.between(*span)) for span in spans])
    left = [i for i in range(300) if not any(first <= i < end for first, end in spans)]
    assert [without.nth(0, n) for n in range(len(left))] == left
    assert [without.locate(i) for i in left] == [order.locate(i) for i in left]


def test_ranks_share_the_kept_samples_and_a_batch_may_span_a_gap() -> None:
    dataset = make_dataset()
    order = dataset.order
    spans = [(12, 30), (33, 34)]
    passing = dataset.following(
        order.passing_over(SkippedRange(*span, order.between(*span)) for span in spans)
    )
    samples = [*range(8, 12), 30, 31, 32, *range(34, 43)]
    per_rank = [first_batches(2, passing, rank=rank, ranks=2, start_sample=8) for rank in range(2)]
    for step in range(2):
        tokens = torch.cat([batches[step].tokens for batches in per_rank])
        here = samples[step * GLOBAL : (step + 1) * GLOBAL]
        assert torch.equal(tokens, torch.stack([torch.from_numpy(dataset[s][0][:-1]).long() for s in here]))
        assert [batches[step].first_sample for batches in per_rank] == [here[0], here[GLOBAL // 2]]


def test_after_a_change_every_source_continues_at_its_position() -> None:
    """An epoch begun under one mixture ends under the next, with each window once."""
    before, after = data(am=1, bl=1), data(am=1, bl=3, cl=2)
    order = after.continuing(before.order, 150)
    history = read(before, 0, 150) + read(after.following(order), 150, 450)
    for name, share in (("am", 75 + 75), ("bl", 75 + 225), ("cl", 150)):
        windows = [(epoch, window) for source, epoch, window in history if source == name]
        assert len(set(windows)) == len(windows) and abs(len(windows) - share) < 3
        assert [epoch for epoch, _ in windows] == sorted(epoch for epoch, _ in windows)
    assert sorted(window for name, epoch, window in history if (name, epoch) == ("am", 0)) == list(range(100))
    # Later changes leave the first 150 samples unchanged.
    assert [order.locate(i) for i in range(150)] == [before.order.locate(i) for i in range(150)]


def test_a_returning_source_continues_at_its_position() -> None:
    both, one = data(al=1, bl=1), data(bl=1)
    order = both.continuing(one.continuing(both.order, 100), 200)
    of_a = [m for source, m in map(order.locate, (*range(100), *range(200, 300))) if source == 0]
    assert of_a == list(range(len(of_a))) and abs(len(of_a) - 100) < 3
    assert {order.sources[order.locate(i)[0]] for i in range(100, 200)} == {"bl"}


def test_a_mixture_in_the_same_proportions_changes_no_sample() -> None:
    first, second = data(al=1, bl=2), data(bl=4, al=2)
    order = second.continuing(first.order, 77)
    assert len(order.segments) == 2
    assert [order.locate(i) for i in range(300)] == [first.order.locate(i) for i in range(300)]


def test_another_order_of_the_same_sources_is_no_change() -> None:
    first = data(al=1, bl=2)
    assert data(bl=2, al=1).continuing(first.order, 77) is first.order


def test_skipped_samples_stay_skipped_under_another_mixture() -> None:
    """Return to sample 20, before the skipped range, and continue with other weights."""
    before, after = data(al=1, bl=1), data(al=1, bl=5, cl=1)
    span = SkippedRange(50, 90, before.order.between(50, 90))
    bad = {before.order.locate(i) for i in range(50, 90)}
    order = after.continuing(before.order.passing_over([span]), 20)
    drawn = [order.locate(order.nth(0, n)) for n in range(400)]
    assert not bad & set(drawn) and len(set(drawn)) == 400
    for source in range(3):
        seen = [m for number, m in [*drawn, *bad] if number == source]
        assert sorted(seen) == list(range(len(seen)))


def test_a_sample_of_a_removed_source_is_an_error() -> None:
    dataset = data(bl=1)
    order = dataset.continuing(data(al=1, bl=1).order, 100)
    with pytest.raises(UserError, match=r"comes from a source that is no longer in data\.sources"):
        read(dataset.following(order), 0, 100)
    assert len(read(dataset.following(order), 100, 50)) == 50


def test_a_source_named_twice_counts_as_two() -> None:
    assert numbered(["x", "y", "x", "x"]) == ["x", "y", "x#2", "x#3"]
    twice = PackedDataset([Numbers("x", 50), Numbers("x", 50)], [1, 1], 1, seed=0, block=10)
    drawn = read(twice, 0, 100)
    assert len(set(drawn)) == 100 and {name for name, _, _ in drawn} == {"x", "x#2"}


def test_the_state_is_small_and_readable() -> None:
    order = data(al=0.25, bl=0.75).order
    for position, weights in ((16, {"al": 1.0, "cm": 2.0}), (64, {"bl": 1.0})):
        order = order.continued(weights, 16, position)
    assert order.state() == {
        "sources": ["al", "bl", "cm"],
        "segments": [
            {"start": 0, "block": 16, "weights": (0.25, 0.75), "drawn": (0, 0)},
            {"start": 16, "block": 16, "weights": (1.0, 0.0, 2.0), "drawn": (4, 12, 0)},
            {"start": 64, "block": 16, "weights": (0.0, 1.0, 0.0), "drawn": (20, 12, 32)},
        ],
    }
    # Nothing was read under the replaced mixture.
    assert len(order.continued({"cm": 1.0}, 16, 64).segments) == 3
