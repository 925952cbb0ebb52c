"""Optimizer moments in one of three formats: the dtype of the arithmetic, bfloat16, or int8 codes.

An update reads a moment in the dtype of the arithmetic, changes it in place and writes it back. Narrow formats are
rounded stochastically (forge/optim/rounding.py), with layout-independent noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from forge.config.schema import OptimizerConfig
from forge.optim.int8 import ZERO, Region, cut_blocks, make_regions
from forge.optim.optimizer import gather_shard_boxes, wide_dtype
from forge.optim.rounding import StochasticRounding
from forge.shard import Shard


class Moments:
    """The moments of `shards`. slots: names of the moments that each shard has.

    narrow: storage dtype, with stochastic rounding; None: `wide_dtype`, without rounding. stored: (slot, parameter
    name) -> tensor, laid out like `shard.data`; initially 0.
    """

    def __init__(self, shards: Sequence[Shard], slots: Sequence[str], narrow: torch.dtype | None):
        self._shards, self._slots = shards, slots
        self.rounding = StochasticRounding(shards, slots) if narrow else None
        self.stored = {
            (slot, shard.name): torch.zeros_like(shard.data, dtype=narrow or wide_dtype(shard))
            for shard in shards
            for slot in slots
        }

    def draw(self, updates: Tensor) -> None:
        """Generate the noise of the next update.

        updates: number of past updates, a scalar or one number per shard; the largest is used.
        """
        if self.rounding is not None:
            self.rounding.draw(updates.max() if updates.dim() else updates)

    def read(self, shard: Shard, slot: str) -> Tensor:
        """Return the moment in `wide_dtype`, laid out like `shard.data`. Change it in place and pass it to `write`."""
        return self.stored[slot, shard.name].to(wide_dtype(shard))

    def write(self, shard: Shard, slot: str, wide: Tensor) -> None:
        """Store `wide`, the tensor returned by `read`.

        May overwrite `wide`. If moments are not rounded, `wide` is the stored tensor itself and needs no copy.
        """
        if self.rounding is not None:
            self.rounding.copy_(self.stored[slot, shard.name], wide, shard, slot)

    def finish(self) -> None:
        """Complete the writes of an update. Collective."""

    def share_loaded(self) -> None:
        """Send scales loaded from a checkpoint to all ranks that need them.

        Call after loading into `tensors`. Collective.
        """

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """Yield (slot, shard, values) of all moments, as in `Optimizer.tensors`."""
        for shard in self._shards:
            for slot in self._slots:
                yield slot, shard, self.stored[slot, shard.name]


class Int8Moments(Moments):
    """Moments in int8 codes, with a scale for each block of elements (forge/optim/int8.py).

    The constructor is collective.

    group: ranks that together hold all elements; None: only this process. A shard boundary may cut a block. The ranks
    that share the block then need a common scale: one all-reduce per update computes the scales of all cut blocks.
    The rank with the block's first element saves its scale.
    """

    rounding: StochasticRounding

    def __init__(self, shards: Sequence[Shard], slots: Sequence[str], group: dist.ProcessGroup | None):
        super().__init__(shards, slots, torch.int8)
        self._group = None if group is None or group.size() == 1 else group
        self._scales: dict[tuple[str, str], Shard] = {}
        self.regions: dict[tuple[str, str], list[Region]] = {}
        agreed = 0
        everyones = zip(*gather_shard_boxes(shards, self._group), strict=True)
        for shard, of_ranks in zip(shards, everyones, strict=True):
            cut = cut_blocks(shard.global_shape, {box for boxes in set(of_ranks) for box in boxes})
            for slot in slots:
                key = slot, shard.name
                self.stored[key].fill_(ZERO.get(slot, 0))
                self._scales[key], self.regions[key] = make_regions(
                    shard, self.stored[key], slot, cut, agreed
                )
                agreed += len(cut)
        self._cut = [
            region for of_shard in self.regions.values() for region in of_shard if len(region.agreed)
        ]
        self.maxima = shards[0].data.new_zeros(agreed, dtype=wide_dtype(shards[0]))

    def read(self, shard: Shard, slot: str) -> Tensor:
        wide = torch.empty_like(shard.data, dtype=wide_dtype(shard))
        pieces = [piece for _, piece in shard.pieces(wide)]
        for region in self.regions[slot, shard.name]:
            region.read(region.part_of(pieces))
        return wide

    def write(self, shard: Shard, slot: str, wide: Tensor) -> None:
        pieces = [piece for _, piece in shard.pieces(wide)]
        noise = [bits for _, bits in self.rounding.noise(shard, slot)]
        for region in self.regions[slot, shard.name]:
            region.write(region.part_of(pieces), region.part_of(noise))

    def finish(self) -> None:
        self._agree((region, region.pending[0].abs().amax(1)) for region in self._cut)
        for region in self._cut:
            region.encode(*region.pending)
            region.pending = ()

    def share_loaded(self) -> None:
        self._agree((region, region.scales[:, 0]) for region in self._cut if region.saved)

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        for slot, shard, codes in super().tensors():
            yield slot, shard, codes
            scales = self._scales[slot, shard.name]
            yield f"{slot}_scale", scales, scales.data

    def _agree(self, known: Iterable[tuple[Region, Tensor]]) -> None:
        """All-reduce the scales of all cut blocks to their maximum over ranks. Collective.

        known: pairs of a region and its local maxima `[rows]`.
        """
        if not len(self.maxima):
            return
        self.maxima.zero_()
        for region, scales in known:
            # A block occurs once in a region, so no index repeats. index_reduce_ has no deterministic CUDA kernel.
            larger = torch.maximum(self.maxima[region.agreed], scales.to(self.maxima.dtype))
            self.maxima[region.agreed] = larger
        if self._group is not None:
            dist.all_reduce(self.maxima, dist.ReduceOp.MAX, group=self._group)
        for region in self._cut:
            region.scales.copy_(self.maxima[region.agreed].unsqueeze(1))


def make_moments(
    shards: Sequence[Shard], slots: Sequence[str], config: OptimizerConfig, group: dist.ProcessGroup | None
) -> Moments:
    """Return moments in the format `optimizer.moment_dtype`. Collective for int8. group: see `Int8Moments`."""
    if config.moment_dtype == "int8":
        return Int8Moments(shards, slots, group)
    return Moments(shards, slots, torch.bfloat16 if config.moment_dtype == "bfloat16" else None)
