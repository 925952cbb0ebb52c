"""Moments in eight bits: blocks of numbers with one scale, the same under every layout.

A block is BLOCK consecutive elements of a row (the last dimension) of the global tensor, on any rank; its scale is
the largest magnitude in it. A first moment is scale * sign(c) (c / 127)^2, a second one scale * (c / 255)^4: fine steps near
zero, where most of a block is. Rounding is stochastic, by the noise of `StochasticRounding`, and its expectation is exact.
(Blocks: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021.)

Parts of ranks may end within a block. Its holders then agree on its scale by one all-reduce for all such blocks per step,
and who holds its first element saves it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from forge.optim.optimizer import gather_shard_boxes, wide_dtype
from forge.optim.rounding import StochasticRounding
from forge.shard import Box, Shard

BLOCK = 64
SIGNED, UNSIGNED = "exp_avg", "exp_avg_sq"

Blocks: TypeAlias = npt.NDArray[np.int64]


@dataclass
class _Region:
    """Columns `[start, stop)` of the rows of a box: whole blocks, or a part of one block of each row.

    scales: of the blocks, `[rows, blocks]`. For parts of blocks, blocks: which they are among those of all tensors, int64
    `[rows]`; agreed: where their maxima are among those of all blocks that are cut; values: parts between an update and the
    agreement, `[rows, columns]`, with their noise.
    """

    box: int
    start: int
    stop: int
    scales: Tensor
    owned: bool
    blocks: Blocks | None = None
    agreed: Tensor | None = None
    values: Tensor | None = None
    noise: Tensor | None = None


class Int8Moments:
    """The moments exp_avg and exp_avg_sq of `shards`. Collective.

    group: the ranks that together hold all elements; None: this process.
    """

    def __init__(self, shards: Sequence[Shard], group: dist.ProcessGroup | None):
        self._shards, self._group = shards, None if group is None or group.size() == 1 else group
        self._of = {shard.name: shard for shard in shards}
        self._rounding = StochasticRounding(shards, (SIGNED, UNSIGNED))
        self._codes: dict[tuple[str, str], Tensor] = {}
        self._scales: dict[tuple[str, str], Shard] = {}
        self._regions: dict[tuple[str, str], list[_Region]] = {}
        first_block, cut = 0, []
        boxes = [set(of_ranks) for of_ranks in zip(*gather_shard_boxes(shards, self._group), strict=True)]
        for slot in (SIGNED, UNSIGNED):
            for shard, of_ranks in zip(shards, boxes, strict=True):
                # -128 is zero of an unsigned code.
                zero = 0 if slot == SIGNED else -128
                self._codes[slot, shard.name] = torch.full_like(shard.data, zero, dtype=torch.int8)
                self._scales[slot, shard.name], regions = _make_regions(shard, first_block)
                self._regions[slot, shard.name] = regions
                for box in {box for held in of_ranks for box in held}:
                    regions_of = _divide(shard.global_shape, box, first_block)
                    cut += [blocks for *_, blocks in regions_of if blocks is not None]
                first_block += prod(_blocks_shape(shard.global_shape))
        self._maxima = self._number(cut)

    def _number(self, cut: list[Blocks]) -> Tensor:
        """Number the blocks of which any rank holds a part: the same on all ranks. Return a place for their maxima."""
        device = self._shards[0].data.device
        numbers = np.unique(np.concatenate(cut)) if cut else np.empty(0, dtype=np.int64)
        for region in self._cut():
            assert region.blocks is not None
            region.agreed = torch.tensor(np.searchsorted(numbers, region.blocks), device=device)
        return torch.zeros(len(numbers), dtype=wide_dtype(self._shards[0]), device=device)

    def draw(self, updates: Tensor) -> None:
        """Draw the noise of the update after `updates`. Call before each update."""
        self._rounding.draw(updates)

    def read(self, shard: Shard, slot: str) -> Tensor:
        """Return the moment in wide_dtype, laid out like `shard.data`."""
        key = slot, shard.name
        wide = torch.empty_like(shard.data, dtype=wide_dtype(shard))
        decode = _DECODE[slot]
        for region, codes, values in self._views(key, self._codes[key], wide):
            scales = region.scales.repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]
            values.copy_(decode(codes.to(wide.dtype)) * scales)
        return wide

    def write(self, shard: Shard, slot: str, wide: Tensor) -> None:
        """Replace the moment by `wide`; parts of blocks only when `agree` is called."""
        key = slot, shard.name
        noise = [bits for _, bits in self._rounding.noise(shard, slot)]
        for region, codes, values in self._views(key, self._codes[key], wide):
            bits = _columns(noise[region.box], region)
            if region.agreed is None:
                padded = F.pad(values.abs(), (0, -values.shape[1] % BLOCK))
                region.scales.copy_(padded.unflatten(1, (-1, BLOCK)).amax(-1))
                codes.copy_(_encode(values, region.scales, bits, slot))
            else:
                region.values, region.noise = values.clone(), bits.clone()

    def agree(self) -> None:
        """Bring in what parts of blocks wait for: the maxima of their blocks over all ranks. Collective."""
        if not len(self._maxima):
            return
        self._maxima.zero_()
        for region in self._cut():
            assert region.values is not None and region.agreed is not None
            # A region has each block once, so this is exact; index_reduce_ has no deterministic kernel on CUDA.
            own = region.values.abs().amax(1).to(self._maxima.dtype)
            self._maxima[region.agreed] = torch.maximum(self._maxima[region.agreed], own)
        self._reduce()
        for key in self._codes:
            for region, codes, _ in self._views(key, self._codes[key], self._codes[key]):
                if region.values is not None and region.noise is not None:
                    codes.copy_(_encode(region.values, region.scales, region.noise, key[0]))
                    region.values = region.noise = None

    def share_loaded(self) -> None:
        """Give the scales that who saves them has loaded to the other ranks that hold parts of their blocks. Collective."""
        if not len(self._maxima):
            return
        self._maxima.zero_()
        for region in self._cut():
            if region.owned and region.agreed is not None:
                self._maxima[region.agreed] = region.scales[:, 0].to(self._maxima.dtype)
        self._reduce()

    def tensors(self, slot: str, shard: Shard) -> Iterator[tuple[str, Shard, Tensor]]:
        """Yield the moment's tensors as `Optimizer.tensors` does."""
        yield slot, shard, self._codes[slot, shard.name]
        scales = self._scales[slot, shard.name]
        yield f"{slot}_scale", scales, scales.data

    def _reduce(self) -> None:
        if self._group is not None:
            dist.all_reduce(self._maxima, dist.ReduceOp.MAX, group=self._group)
        for region in self._cut():
            region.scales.copy_(self._maxima[region.agreed].unsqueeze(1))

    def _cut(self) -> Iterator[_Region]:
        for regions in self._regions.values():
            yield from (region for region in regions if region.blocks is not None)

    def _views(
        self, key: tuple[str, str], codes: Tensor, values: Tensor
    ) -> Iterator[tuple[_Region, Tensor, Tensor]]:
        """Yield regions with their parts of two tensors laid out like the shard's data, `[rows, columns]`."""
        shard = self._of[key[1]]
        pieces = [
            (code, value)
            for (_, code), (_, value) in zip(shard.pieces(codes), shard.pieces(values), strict=True)
        ]
        for region in self._regions[key]:
            code, value = pieces[region.box]
            yield region, _columns(code, region), _columns(value, region)


def _columns(piece: Tensor, region: _Region) -> Tensor:
    return piece.reshape(-1, piece.shape[-1] if piece.dim() else 1)[:, region.start : region.stop]


def _blocks_shape(shape: torch.Size) -> torch.Size:
    *rows, columns = shape or (1,)
    return torch.Size([*rows, -(-columns // BLOCK)])


def _divide(shape: torch.Size, box: Box, first_block: int) -> Iterator[tuple[int, int, Blocks | None]]:
    """Divide a box of a tensor of this global shape at the edges of blocks: yield columns [start, stop) of the tensor, and
    if they are parts of blocks, which block it is of each row: int64 `[rows]`.

    first_block: the number of the tensor's first block among those of all tensors.
    """
    *counts, of_row = _blocks_shape(shape)
    columns = (shape or (1,))[-1]
    *tops, left = box.offsets or (0,)
    *heights, width = box.sizes or (1,)
    right = left + width
    inside = -(-left // BLOCK) * BLOCK, columns if right == columns else right // BLOCK * BLOCK
    edges = sorted({left, right, *(edge for edge in inside if left < edge < right)})
    for start, stop in itertools.pairwise(edges):
        if start % BLOCK == 0 and (stop % BLOCK == 0 or stop == columns):
            yield start, stop, None
            continue
        rows = np.zeros((), dtype=np.int64)
        for top, height, count in zip(tops, heights, counts, strict=True):
            rows = rows[..., None] * count + np.arange(top, top + height)
        yield start, stop, first_block + rows.reshape(-1) * of_row + start // BLOCK


def _make_regions(shard: Shard, first_block: int) -> tuple[Shard, list[_Region]]:
    """Divide the boxes of `shard`; return the scales that this rank saves, and all regions. first_block: see `_divide`."""
    found: list[tuple[_Region, Box, tuple[int, ...]]] = []
    for number, box in enumerate(shard.boxes):
        *tops, left = box.offsets or (0,)
        *heights, _ = box.sizes or (1,)
        for start, stop, blocks in _divide(shard.global_shape, box, first_block):
            block, end = start // BLOCK, -(-stop // BLOCK)
            region = _Region(number, start - left, stop - left, shard.data, start % BLOCK == 0, blocks)
            found.append((region, Box((*tops, block), (*heights, end - block)), (prod(heights), end - block)))
    owned = [(region, box, shape) for region, box, shape in found if region.owned]
    values = shard.data.new_zeros(sum(box.numel for _, box, _ in owned), dtype=wide_dtype(shard))
    scales = replace(
        shard,
        global_shape=_blocks_shape(shard.global_shape),
        boxes=tuple(box for _, box, _ in owned),
        parameter=values,
        heads=1,
        boxes_on=None,
    )
    for (region, _, shape), (_, piece) in zip(owned, scales.pieces(values), strict=True):
        region.scales = piece.view(shape)
    for region, _, shape in found:
        if not region.owned:
            region.scales = values.new_zeros(shape)
    return scales, [region for region, *_ in found]


def _decode_signed(codes: Tensor) -> Tensor:
    """codes from -127 to 127 -> numbers from -1 to 1."""
    return codes * codes.abs() / 127**2


def _decode_unsigned(codes: Tensor) -> Tensor:
    """codes from -128 to 127 -> numbers from 0 to 1."""
    return ((codes + 128) / 255) ** 4


_DECODE: dict[str, Callable[[Tensor], Tensor]] = {SIGNED: _decode_signed, UNSIGNED: _decode_unsigned}


def _encode(values: Tensor, scales: Tensor, noise: Tensor, slot: str) -> Tensor:
    """Return codes of `values` `[rows, columns]`, one of the two nearest each; its expectation is the value.

    scales `[rows, blocks]`; noise: int32 `[rows, columns]`, from 0 to 2^16 - 1. A value that a code has gets this code. A
    positive second moment does not become 0, by which its first moment would be divided.
    """
    scales = scales.repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]
    relative = torch.where(scales > 0, values / scales, 0.0)
    decode = _DECODE[slot]
    if slot == SIGNED:
        below = (relative.abs().sqrt() * 127 * relative.sign()).floor_().clamp_(-127, 126)
    else:
        below = (relative.sqrt().sqrt() * 255 - 128).floor_().clamp_(-128, 126)
    low, high = decode(below), decode(below + 1)
    # Half a step of the noise keeps what is a code but for rounding.
    up = (relative - low) / (high - low) > (noise.to(values.dtype) + 0.5) / (1 << 16)
    codes = below + up
    return codes if slot == SIGNED else codes.clamp_min_(-127).where(relative > 0, -128.0)
