"""Which sample of which source is global sample i: a pure function of (weights, sizes, seed, block, i).

Samples come in blocks of B. With cumulative normalised weights C_0 = 0, ..., C_S = 1, source s has contributed
    count_s(b) = floor(b B C_{s+1}) - floor(b B C_s)
samples when block b starts: within one of its share, and all counts add up to b B. Within the block the
sources' turns are shuffled by key. The m-th sample that a source of n windows contributes in the whole run is
window permutation_e(m mod n) of its epoch e = m div n. So an epoch shows each window once before the next one
begins, and a source that is exhausted, or smaller than a batch, continues with its next epoch.

Weights are exact fractions and samples exact integers, so nothing drifts at 10^13 samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import ceil, isfinite, lcm

import numpy as np

from forge.data.permutation import Permutation, hash_positions, key_of
from forge.errors import UserError

# So that a block, which is held in memory, has at most 10^6 samples: the largest data.mixture_block, too.
_SMALLEST_SHARE = Fraction(1, 10**6)


class Mixture:
    """Global order over sources of `sizes` windows each, drawn in proportion to `weights` (any sum; 0: never).

    `block` is B above. It grows to 1/(smallest positive share) where it is less than that: with fewer samples in a
    block the rounded cumulative shares could take a sample back from a source. UserError for a share below 1e-6.
    """

    def __init__(self, weights: Sequence[float], sizes: Sequence[int], seed: int, block: int = 1024):
        assert len(weights) == len(sizes) and block >= 1
        if any(not isfinite(weight) or weight < 0 for weight in weights) or not any(weights):
            raise UserError(
                f"data.sources: weights must be finite, not negative and not all 0, got {list(weights)}"
            )
        # The decimal that the user wrote, not its nearest binary fraction: 0.1 is one tenth.
        exact = [Fraction(str(weight)) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        assert all(size >= 1 for size, share in zip(sizes, shares, strict=True) if share > 0)
        self.sizes = list(sizes)
        self.seed = seed
        smallest = min(share for share in shares if share > 0)
        if smallest < _SMALLEST_SHARE:
            raise UserError(
                f"data.sources: of weights {list(weights)} the smallest is less than a millionth of all; "
                "raise it, or make it 0 to leave the source out"
            )
        self.block = max(block, ceil(1 / smallest))
        self._denominator = lcm(*(share.denominator for share in shares))
        numerators = [int(share * self._denominator) for share in shares]
        self._cumulative = [sum(numerators[:s]) for s in range(len(shares) + 1)]
        # In use are the current block, and one or two epochs of each source.
        self._turns = lru_cache(maxsize=2)(self._make_turns)
        self._epoch_order = lru_cache(maxsize=2 * len(sizes) + 2)(
            lambda source, epoch: Permutation(sizes[source], key_of(seed, "epoch", source, epoch))
        )

    def locate(self, global_sample: int) -> tuple[int, int, int]:
        """Return (source, epoch, window within the source) of sample `global_sample`, counted from 0."""
        block, position = divmod(global_sample, self.block)
        sources, ranks = self._turns(block)
        source = int(sources[position])
        given = self._given(block)
        count = given[source + 1] - given[source] + int(ranks[position])
        epoch, index = divmod(count, self.sizes[source])
        return source, epoch, self._epoch_order(source, epoch)(index)

    def _given(self, block: int) -> list[int]:
        """floor(b B C_s) for s = 0 ... S."""
        samples = block * self.block
        return [samples * cumulative // self._denominator for cumulative in self._cumulative]

    def _make_turns(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """For each position of the block: its source, and the number of earlier positions of that source in the block."""
        before, after = self._given(block), self._given(block + 1)
        firsts = [end - start for start, end in zip(before, after, strict=True)]
        counts = np.diff(firsts)
        draws = hash_positions(0, self.block, key_of(self.seed, "mixture block", block))
        sources = np.repeat(np.arange(len(counts)), counts)[np.argsort(draws, kind="stable")]
        ranks = np.empty(self.block, np.int64)
        ranks[np.argsort(sources, kind="stable")] = np.arange(self.block) - np.repeat(firsts[:-1], counts)
        return sources, ranks
