"""Stochastic rounding to bfloat16: small changes of a moment are kept on average instead of being lost.

bfloat16 has 8 significant bits. With beta2 = 0.999 a moving average changes by less than half of its last bit per step.
Rounding to nearest would therefore never change it. With stochastic rounding, a value between two neighbouring
bfloat16 numbers is rounded up with a probability proportional to its distance from the lower number. The expectation
is then exact (Gupta et al., "Deep Learning with Limited Numerical Precision", 2015). The standard deviation of the error
is about 6 % of the value of a slow average, for any beta: a slower average makes smaller errors, and forgets them more
slowly.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from forge.model.noise import mix
from forge.shard import Box, Shard

# An odd 64-bit multiplier.
_POSITION = -7046029254386353131


class StochasticRounding:
    """Rounds the optimizer state `slots` of `shards` stochastically, with noise that does not depend on the layout.

    The noise of an element is the xor of one uniform number per dimension. Each number is a hash of (name, slot,
    dimension, global index along the dimension, number of updates). Noise is uniform, and independent between any two
    elements.
    """

    def __init__(self, shards: Sequence[Shard], slots: Iterable[str]):
        self._sizes: dict[tuple[str, str], list[int]] = {}
        keys = []
        for slot in slots:
            for shard in shards:
                sizes = self._sizes[slot, shard.name] = []
                for box in shard.boxes:
                    for d, (offset, size) in enumerate(
                        zip(box.offsets or (0,), box.sizes or (1,), strict=True)
                    ):
                        index = torch.arange(offset, offset + size, device=shard.data.device)
                        keys.append(index * _POSITION + _key(f"{slot}:{shard.name}:{d}"))
                        sizes.append(size)
        self._keys = torch.cat(keys) if keys else torch.empty(0, dtype=torch.int64)
        self._noise: dict[tuple[str, str], list[Tensor]] = {}
        self.bits = noise_bits  # CompiledAdamW replaces this function

    def draw(self, updates: Tensor) -> None:
        """Generate the noise of the next update. updates: number of past updates, a scalar on the shards' device."""
        # Without an element on this rank, the empty keys are on the CPU.
        noise = self.bits(self._keys.to(updates.device), updates).split(
            [sum(sizes) for sizes in self._sizes.values()]
        )
        for (which, sizes), of_shard in zip(self._sizes.items(), noise, strict=True):
            self._noise[which] = list(of_shard.split(sizes))

    def noise(self, shard: Shard, slot: str) -> Iterator[tuple[Box, Tensor]]:
        """Yield (box, this update's noise in the box's shape) for each box of `shard`. Noise is int32 from 0 to 2^16 - 1."""
        vectors = iter(self._noise[slot, shard.name])
        for box in shard.boxes:
            dims = len(box.sizes or (1,))
            along = [next(vectors).view(-1, *[1] * (dims - 1 - d)) for d in range(dims)]
            yield box, functools.reduce(operator.xor, along).view(box.sizes)

    def factors(self, shard: Shard, slot: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield two integer tensors for each box of the shard: rows `[rows, 1]` and columns `[columns]`.

        Their xor, `[rows, columns]`, is the noise of this update. A box is a rectangular part of the parameter. A row runs
        along the last dimension; a vector is one row.
        """
        vectors = iter(self._noise[slot, shard.name])
        for box in shard.boxes:
            *leading, columns = (next(vectors) for _ in box.sizes or (1,))
            rows = torch.zeros_like(columns[:1])
            for vector in leading:
                rows = (rows.unsqueeze(-1) ^ vector).flatten()
            yield rows.unsqueeze(-1), columns

    def copy_(self, narrow: Tensor, wide: Tensor, shard: Shard, slot: str) -> None:
        """Round `wide` (float32 or float64) into `narrow` (bfloat16), both laid out like `shard.data`.

        Values representable in bfloat16 do not change. May overwrite `wide`.
        """
        exact = wide.to(torch.float32)
        bits = exact.view(torch.int32)
        for (_, piece), (_, noise) in zip(shard.pieces(bits), self.noise(shard, slot), strict=True):
            # bfloat16 is the upper half of float32, so a carry out of the lower half rounds up.
            piece.add_(noise)
        torch.bitwise_right_shift(bits, 16, out=narrow.view(torch.int16))


def noise_bits(keys: Tensor, updates: Tensor) -> Tensor:
    """Return 16 uniform bits for each key: int32 `[n]`. keys: int64 `[n]`. updates: number of past updates, a scalar."""
    return (mix(keys + mix(updates.to(torch.int64) * _POSITION)) & 0xFFFF).to(torch.int32)


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
