"""Samples that are passed over leave the order of all others as it is, from any position and for any batch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.data.passed_over import merge, nth_sample
from tests.support.streams import GLOBAL, first_batches, make_dataset

ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=4)


@given(ranges, st.integers(0, 70))
def test_the_order_is_that_of_the_samples_outside_the_ranges(given_ranges, position) -> None:
    left = [i for i in range(position, 300) if not any(first <= i < end for first, end in given_ranges)]
    passed_over = merge(given_ranges)
    assert [nth_sample(position, n, passed_over) for n in range(100)] == left[:100]


@given(ranges, st.integers(0, 70), st.integers(0, 40), st.integers(0, 40))
def test_reading_on_from_where_one_stopped_is_reading_at_once(given_ranges, position, some, more) -> None:
    passed_over = merge(given_ranges)
    stopped = nth_sample(position, some, passed_over)
    assert nth_sample(stopped, more, passed_over) == nth_sample(position, some + more, passed_over)


def test_merged_ranges_are_sorted_and_apart() -> None:
    assert merge([(40, 50), (8, 16), (16, 20), (12, 14), (5, 5)]) == ((8, 20), (40, 50))


def test_ranks_share_out_what_is_left_and_a_batch_may_go_over_a_gap() -> None:
    dataset = make_dataset()
    passed_over = ((12, 30), (33, 34))
    samples = [*range(8, 12), 30, 31, 32, *range(34, 43)]
    per_rank = [
        first_batches(2, dataset, rank=rank, ranks=2, start_sample=8, passed_over=passed_over)
        for rank in range(2)
    ]
    for step in range(2):
        tokens = torch.cat([batches[step].tokens for batches in per_rank])
        here = samples[step * GLOBAL : (step + 1) * GLOBAL]
        assert torch.equal(tokens, torch.stack([torch.from_numpy(dataset[s][0][:-1]).long() for s in here]))
        assert [batches[step].first_sample for batches in per_rank] == [here[0], here[GLOBAL // 2]]
