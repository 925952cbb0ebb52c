"""A keyed permutation of range(n) in constant memory, to shuffle any number of samples.

A Feistel network permutes range(4^k), for the smallest k with 4^k >= n. Values >= n are permuted again until they are
below n (cycle walking). The result is a bijection of range(n).
"""

from __future__ import annotations

import hashlib

import numpy as np

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, so successive multiples are spread over all 64 bits
_ROUNDS = 8  # four make a Feistel network pseudo-random; more are needed for tiny halves


def key_of(*parts: int | str) -> int:
    """Return a 64-bit key of `parts`, e.g. (seed, purpose, ...).

    Different parts give unrelated keys. Keys are equal on every machine.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def scramble(value: int) -> int:
    """Apply the splitmix64 finaliser, a bijection of 64-bit integers. Every input bit influences every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _scramble_all(values: np.ndarray) -> np.ndarray:
    """Return `scramble` of each element of `values`, uint64 `[n]`."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_positions(start: int, stop: int, key: int) -> np.ndarray:
    """Return 64 random bits for each position from start to stop - 1: uint64 `[stop - start]`.

    The bits are the `scramble` of a keyed counter.
    """
    bits = np.uint64(key) + np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return _scramble_all(bits)


class Permutation:
    """`permutation(i)` is a bijection of range(n), selected by the 64-bit `key`. O(1) time and memory; n up to 2^126."""

    def __init__(self, n: int, key: int):
        assert n >= 1
        self.n = n
        self._half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._round_keys = [scramble((key + (r + 1) * _GOLDEN) & _MASK64) for r in range(_ROUNDS)]

    def __call__(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise IndexError(f"{i} is not in range({self.n})")
        value = self._feistel(i)
        while value >= self.n:
            value = self._feistel(value)
        return value

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """Return, for each of `values`, the i with permutation(i) = value: int64 `[k]`. n must be at most 2^62."""
        found = values.astype(np.uint64)
        pending = np.arange(len(found))
        while len(pending):
            before = self._inverse_feistel(found[pending])
            found[pending] = before
            pending = pending[before >= np.uint64(self.n)]
        return found.astype(np.int64)

    def _inverse_feistel(self, values: np.ndarray) -> np.ndarray:
        half, mask = np.uint64(self._half_bits), np.uint64(self._half_mask)
        left, right = values >> half, values & mask
        for key in reversed(self._round_keys):
            left, right = right ^ (_scramble_all(left ^ np.uint64(key)) & mask), left
        return (left << half) | right

    def _feistel(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (scramble(right ^ key) & self._half_mask)
        return (left << self._half_bits) | right
