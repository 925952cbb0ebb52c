"""An endless generated token stream. A model starts to learn it within ten steps."""

from __future__ import annotations

import numpy as np

from forge.data.permutation import hash_positions, key_of
from forge.runtime.errors import UserError

BLOCK = 1024
_TOKENS = 1 << 60


class SyntheticSource:
    """A first-order Markov chain over `vocab_size` ids. seed: selects the sampled stream.

    The next token is the successor (id + 1 mod vocab_size) or a jump, with probability 1/2 each. A jump goes to one of
    K = max(1, min(8, vocab_size // 8)) evenly spaced ids. The k-th id has a probability proportional to 2^-k. J is this
    distribution and H(J) its entropy. For vocabularies of 128 or more, entropies in nats are about
        uniform  ln(vocab_size)      loss of an untrained model
        unigram  H(J) + 2 ln 2 = 2.7 loss after some steps
        rate     ln 2 + H(J)/2 = 1.4 the lowest possible loss
    The last two are a little lower for small vocabularies. Every block of 1024 tokens starts with a jump and depends
    only on (seed, block). Any part of the stream can therefore be computed without the parts before it. One jump in 64
    begins a document, and documents have 128 tokens on average.
    """

    name = "synthetic"

    def __init__(self, seed: int, vocab_size: int):
        if vocab_size < 2:
            raise UserError(f"a synthetic source needs model.vocab_size of at least 2, got {vocab_size}")
        self.vocab_size = vocab_size
        self.tokens = _TOKENS
        self._key = key_of(seed, "synthetic")
        targets = max(1, min(8, vocab_size // 8))
        self._targets = np.arange(targets) * (vocab_size // targets)
        weights = 0.5 ** np.arange(targets)
        self._thresholds = (np.cumsum(weights / weights.sum()) * 2**32)[:-1].astype(np.uint64)
        self.fingerprint = f"synthetic-1-{self._key:016x}-{vocab_size}"

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens start ... start + count - 1, int64 `[count]`."""
        begin = start - start % BLOCK
        bits, jump = self._draw(begin, start + count)
        targets = self._targets[np.searchsorted(self._thresholds, bits >> np.uint64(32), side="right")]
        place = np.arange(len(jump))
        last_jump = np.maximum.accumulate(np.where(jump, place, 0))
        tokens = (targets[last_jump] + place - last_jump) % self.vocab_size
        return tokens[start - begin :]

    def document_ids(self, start: int, count: int) -> np.ndarray:
        """Return the document numbers of tokens start ... start + count - 1: int32 `[count]`.

        The document of token `start` has number 0, the next document has number 1, and so on.
        """
        bits, jump = self._draw(start, start + count)
        starts = jump & ((bits >> np.uint64(1)) & np.uint64(63) == 0)
        starts[0] = False
        return np.cumsum(starts, dtype=np.int32)

    def _draw(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return 64 random bits per position (splitmix64 of key and position), and a mask of jumps: both `[end - begin]`."""
        bits = hash_positions(begin, end, self._key)
        return bits, (bits & np.uint64(1) == 0) | (np.arange(begin, end) % BLOCK == 0)
