import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.data.permutation import Permutation, hash_positions, key_of, scramble

KEYS = st.integers(0, 2**64 - 1)


@given(n=st.integers(1, 600), key=KEYS)
def test_is_a_bijection(n, key):
    permutation = Permutation(n, key)
    assert sorted(map(permutation, range(n))) == list(range(n))


@pytest.mark.parametrize("n", [4**6 - 1, 4**6, 4**6 + 1, 2 * 4**6])
def test_is_a_bijection_around_powers_of_four(n):
    assert len({*map(Permutation(n, 7), range(n))}) == n


@given(n=st.integers(10**12, 10**13), key=KEYS, start=st.integers(0, 10**12 - 50))
def test_stays_in_range_without_repeats_at_ten_trillion(n, key, start):
    images = [Permutation(n, key)(i) for i in range(start, start + 50)]
    assert len(set(images)) == 50 and all(0 <= image < n for image in images)


def test_other_keys_give_other_orders():
    orders = {tuple(map(Permutation(20, key_of(0, "epoch", 0, epoch)), range(20))) for epoch in range(50)}
    assert len(orders) == 50


def test_key_distinguishes_purposes_and_numbers():
    assert (
        len(
            {key_of(1, "a", 2), key_of(1, "a", 3), key_of(1, "b", 2), key_of(2, "a", 2), key_of(1, "a", 2, 0)}
        )
        == 5
    )


def test_the_order_never_changes():
    """Checkpoints hold a position in this order. Another order would replay and skip samples."""
    assert [Permutation(1000, 42)(i) for i in range(6)] == [998, 721, 62, 193, 563, 996]
    assert hash_positions(10**15, 10**15 + 1, 42)[0] == scramble(
        (42 + (10**15 + 1) * 0x9E3779B97F4A7C15) % 2**64
    )


@pytest.mark.parametrize("n", [1000, 4096, 50_000])
def test_neighbours_are_unrelated(n):
    permutation = Permutation(n, key_of(3, "test"))
    images = [permutation(i) for i in range(n)]
    steps = [(b - a) % n for a, b in pairwise(images)]
    shuffled = random.Random(0).sample(range(n), n)
    reference = [(b - a) % n for a, b in pairwise(shuffled)]
    # Lag-one correlation of a random order is 0 +- 1/sqrt(n); distinct step sizes are about n (1 - 1/e).
    mean = (n - 1) / 2
    correlation = sum((a - mean) * (b - mean) for a, b in pairwise(images)) / (n * n * n / 12)
    assert abs(correlation) < 4 / n**0.5
    assert abs(len(set(steps)) - len(set(reference))) < 5 * n**0.5


def test_every_place_is_equally_likely():
    counts = [0] * 7
    for key in range(7000):
        counts[Permutation(7, key_of(key, "x"))(2)] += 1
    assert all(abs(count - 1000) < 150 for count in counts)
