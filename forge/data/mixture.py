"""The source of global sample i: a pure function of (weights, seed, block, i).

Each global sample comes from one source, and counts as one turn of this source. Samples come in blocks of B. C_0 = 0,
..., C_S = 1 are the cumulative normalised weights. Before block b, the number of turns of source s is

    turns_s(b) = floor(b B C_{s+1}) - floor(b B C_s)

This number differs from the source's exact share by less than one, and the numbers of all sources add up to b B. Within
a block, a keyed hash shuffles the turns. forge/data/order.py selects the source's sample for each turn. Weights are
exact fractions and sample numbers exact integers, so there is no drift even at 10^13 samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import ceil, isfinite, lcm

import numpy as np

from forge.config.phases import SMALLEST_SHARE
from forge.data.permutation import hash_positions, key_of
from forge.runtime.errors import UserError


class Mixture:
    """The source of each global sample, in proportion to `weights`.

    weights: may have any sum; 0: the source is never read. block: number of samples per shuffled block, raised to at
    least 1 / (smallest positive share). With smaller blocks, rounding could make turns_s(b), a source's total before
    block b, decrease as b grows. Raises UserError for a share below 1e-6.
    """

    def __init__(self, weights: Sequence[float], seed: int, block: int = 1024):
        assert block >= 1
        if any(not isfinite(weight) or weight < 0 for weight in weights) or not any(weights):
            raise UserError(
                f"data.sources: weights must be finite, not negative and not all 0, got {list(weights)}"
            )
        # The user's decimal, not the nearest binary fraction: 0.1 is one tenth.
        exact = [Fraction(str(weight)) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        self.seed = seed
        smallest = min(share for share in shares if share > 0)
        if smallest < SMALLEST_SHARE:
            raise UserError(
                f"data.sources: the smallest of the weights {list(weights)} is less than a millionth of their sum; "
                "raise it, or set it to 0 to leave the source out"
            )
        self.block = max(block, ceil(1 / smallest))
        self._denominator = lcm(*(share.denominator for share in shares))
        numerators = [int(share * self._denominator) for share in shares]
        self._cumulative = [sum(numerators[:s]) for s in range(len(shares) + 1)]
        self._order = lru_cache(maxsize=4)(
            self._make_order
        )  # the loader reads within a block or at the boundary of two

    def turn(self, sample: int) -> tuple[int, int]:
        """Return (source of global sample `sample`, number of earlier global samples of this source)."""
        block, position = divmod(sample, self.block)
        sources, ranks = self._order(block)
        source = int(sources[position])
        before = self._before(block)
        return source, before[source + 1] - before[source] + int(ranks[position])

    def turns(self, sample: int) -> list[int]:
        """Return the number of samples of each source among global samples 0 ... sample - 1."""
        block, position = divmod(sample, self.block)
        before = self._before(block)
        within = np.bincount(self._order(block)[0][:position], minlength=len(before) - 1).tolist()
        return [end - start + more for start, end, more in zip(before[:-1], before[1:], within, strict=True)]

    def _before(self, block: int) -> list[int]:
        """Return, for s = 0 ... S, the number of samples of sources 0 to s - 1 before block `block`. S: number of sources."""
        samples = block * self.block
        return [samples * cumulative // self._denominator for cumulative in self._cumulative]

    def _make_order(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each position of a block, its source and the number of earlier positions with this source.

        Both are int64 `[block]`.
        """
        before, after = self._before(block), self._before(block + 1)
        firsts = [end - start for start, end in zip(before, after, strict=True)]
        counts = np.diff(firsts)
        draws = hash_positions(0, self.block, key_of(self.seed, "mixture block", block))
        sources = np.repeat(np.arange(len(counts)), counts)[np.argsort(draws, kind="stable")]
        ranks = np.empty(self.block, np.int64)
        ranks[np.argsort(sources, kind="stable")] = np.arange(self.block) - np.repeat(firsts[:-1], counts)
        return sources, ranks
