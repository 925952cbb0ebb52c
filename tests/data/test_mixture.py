import tracemalloc
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data.order import Mixture
from forge.runtime.errors import UserError
from tests.support.streams import located

WEIGHTS = st.lists(
    st.sampled_from([0.0, 0.001, 0.1, 0.25, 0.3, 1.0, 2.5, 7.0]), min_size=1, max_size=5
).filter(any)


def blocks(mixture, first, count):
    """Return (source, earlier samples of this source) for each sample of some blocks."""
    return [mixture.turn(i) for i in range(first * mixture.block, (first + count) * mixture.block)]


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(weights=WEIGHTS, sizes=st.lists(st.integers(1, 40), min_size=5, max_size=5), block=st.integers(1, 64))
def test_d4_each_epoch_shows_every_window_once_before_the_next_begins(weights, sizes, block):
    samples = located(weights, sizes[: len(weights)], range(700), seed=1, block=block)
    for source, size in enumerate(sizes[: len(weights)]):
        drawn = [(epoch, window) for s, epoch, window in samples if s == source]
        assert [epoch for epoch, _ in drawn] == [m // size for m in range(len(drawn))]
        for start in range(0, len(drawn) - size + 1, size):
            assert sorted(window for _, window in drawn[start : start + size]) == list(range(size))


@settings(max_examples=50, deadline=None)
@given(weights=WEIGHTS, block=st.integers(1, 50))
def test_counts_are_within_one_of_the_share_after_every_block(weights, block):
    mixture = Mixture(weights, seed=0, block=block)
    drawn = Counter()
    for b in range(max(1, min(20, 2000 // mixture.block))):
        drawn.update(source for source, _ in blocks(mixture, b, 1))
        assert mixture.turns((b + 1) * mixture.block) == [drawn[source] for source in range(len(weights))]
        for source, weight in enumerate(weights):
            share = Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights)
            assert abs(drawn[source] - share * (b + 1) * mixture.block) < 1


def test_a_sample_does_not_depend_on_earlier_requests():
    given = [1, 2, 0.5], [7, 100, 31]
    forward = located(*given, range(500), seed=5, block=16)
    assert located(*given, reversed(range(500)), seed=5, block=16) == forward[::-1]
    assert located(*given, (3, 250, 499), seed=5, block=16) == [forward[i] for i in (3, 250, 499)]


def test_turns_count_a_sources_earlier_samples():
    mixture = Mixture([1, 0, 2, 0.5], seed=5, block=16)
    drawn = [0, 0, 0, 0]
    for i in range(100):
        assert mixture.turns(i) == drawn
        source, turns = mixture.turn(i)
        assert turns == drawn[source]
        drawn[source] += 1


def test_sources_are_spread_over_a_block():
    order = [source for source, _ in blocks(Mixture([1, 1], seed=0, block=1024), 0, 1)]
    changes = sum(a != b for a, b in pairwise(order))
    assert 400 < changes < 620


def test_is_exact_at_ten_trillion_samples():
    weights, sizes = [0.1, 0.2, 0.7], [10**12, 3 * 10**12 + 1, 10**13]
    block = 1000
    before, after, later = (
        located(weights, sizes, range(first, first + block), seed=0, block=block)
        for first in (10**13 - block, 10**13, 10**13 + block)
    )
    assert Counter(source for source, _, _ in after + later) == {0: 200, 1: 400, 2: 1400}
    # At this point source 0 has given 10^12 samples, exactly one epoch. Its next sample begins epoch 1.
    assert {epoch for source, epoch, _ in after if source == 0} == {1}
    assert {epoch for source, epoch, _ in before if source == 0} == {0}


def test_weight_zero_is_never_drawn():
    mixture = Mixture([0, 3, 0, 1, 0], seed=0, block=8)
    assert {source for source, _ in blocks(mixture, 0, 20)} == {1, 3}


def test_d4_only_ratios_of_weights_matter():
    first, second = (Mixture(weights, seed=0, block=12) for weights in ([1, 2], [0.2, 0.4]))
    assert blocks(first, 0, 10) == blocks(second, 0, 10)


def test_a_share_below_one_sample_in_a_block_is_given_in_a_larger_block():
    mixture = Mixture([1, 0.001, 1, 0.001], seed=0, block=16)
    assert mixture.block == 2002
    assert Counter(source for source, _ in blocks(mixture, 0, 3)) == {0: 3000, 1: 3, 2: 3000, 3: 3}


def test_epochs_and_seeds_differ_in_order():
    drawn = located([1], [30], range(90), seed=0, block=30), located([1], [30], range(30), seed=1, block=30)
    windows = [[window for _, _, window in samples] for samples in drawn]
    assert len({*(tuple(windows[0][first : first + 30]) for first in (0, 30, 60)), tuple(windows[1])}) == 4


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("nan")], [float("inf"), 1], [1, 1e-7]])
def test_d4_impossible_weights_are_refused(weights):
    with pytest.raises(UserError, match="weights"):
        Mixture(weights, seed=0)


def test_the_order_never_changes():
    """Checkpoints hold a position in this order. Another order would replay and skip samples."""
    assert located([1, 3], [100, 1000], range(10**13, 10**13 + 4), seed=7, block=16) == [
        (1, 7500000000, 690),
        (0, 25000000000, 14),
        (0, 25000000000, 97),
        (0, 25000000000, 95),
    ]


def test_memory_does_not_grow_with_the_number_of_samples():
    tracemalloc.start()
    located([1, 2], [10**13, 10**12], range(0, 10**13, 10**11), seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6
