"""Optimizer state in int8: blocks with one scale each, equal under every layout.

A block is BLOCK consecutive elements of a row (the last dimension) of the global tensor. Its scale is the largest
magnitude in the block. A code c means scale * sign(c) (c / 127)^2 in a first moment, and scale * ((c + 128) / 255)^4 in
a second moment: steps are fine near zero, where most values are. Rounding is stochastic, with the noise of
`StochasticRounding`, so its expectation is exact. (Blocks: Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", 2021.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from forge.optim.optimizer import wide_dtype
from forge.shard import Box, Shard

BLOCK = 64
# The code of value 0 in second moments, which are unsigned.
ZERO = {"exp_avg_sq": -128}


@dataclass
class Region:
    """A range of columns in all rows of one box: whole quantisation blocks, or one cut block per row.

    A cut block is divided by a shard boundary, so the rank has only part of it. codes: int8 `[rows, columns]`. scales:
    `[rows, blocks]`. saved: True if this rank saves the scales. agreed: for cut blocks, each row's index among the
    all-reduced scales, int64 `[rows]`; else empty. pending: values and noise of cut blocks until the scales are known; else
    empty.
    """

    box: int
    columns: slice
    signed: bool
    saved: bool
    codes: Tensor
    scales: Tensor
    agreed: Tensor
    pending: tuple[Tensor, ...] = ()

    def part_of(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the region's part `[rows, columns]` of a tensor laid out like the shard's data.

        pieces: the tensor, as one view for each box of the shard.
        """
        piece = pieces[self.box]
        return piece.reshape(-1, piece.shape[-1] if piece.dim() else 1)[:, self.columns]

    def read(self, values: Tensor) -> None:
        """Decode the region into `values` `[rows, columns]`."""
        values.copy_(_decode(self.codes.to(values.dtype), self.signed) * self._by_element())

    def write(self, values: Tensor, noise: Tensor) -> None:
        """Encode `values` `[rows, columns]`. noise: as for `encode`.

        Cut blocks need a scale common to several ranks. For them, store `values` and `noise` in `pending`, to be encoded
        after the ranks have agreed on `scales`.
        """
        if len(self.agreed):
            self.pending = values.clone(), noise.clone()
            return
        padded = F.pad(values.abs(), (0, -values.shape[1] % BLOCK))
        self.scales.copy_(padded.unflatten(1, (-1, BLOCK)).amax(-1))
        self.encode(values, noise)

    def encode(self, values: Tensor, noise: Tensor) -> None:
        """Round each value stochastically to one of the two nearest codes, such that the expectation is the value.

        noise: int32 from 0 to 2^16 - 1. An exactly representable value keeps its code. A positive second moment is not
        rounded to 0, because updates divide by its square root.
        """
        scales = self._by_element()
        relative = torch.where(scales > 0, values / scales, 0.0)
        if self.signed:
            below = (relative.abs().sqrt() * 127 * relative.sign()).floor_().clamp_(-127, 126)
        else:
            below = (relative.sqrt().sqrt() * 255 - 128).floor_().clamp_(-128, 126)
        low, high = _decode(below, self.signed), _decode(below + 1, self.signed)
        # With the 0.5, a value that differs from a code only by rounding error keeps this code.
        up = (relative - low) / (high - low) > (noise.to(values.dtype) + 0.5) / (1 << 16)
        codes = below + up
        self.codes.copy_(codes if self.signed else codes.clamp_min_(-127).where(relative > 0, -128.0))

    def _by_element(self) -> Tensor:
        return self.scales.repeat_interleave(BLOCK, dim=1)[:, : self.codes.shape[1]]


def make_regions(
    shard: Shard, codes: Tensor, slot: str, cut: NDArray[np.int64], first: int
) -> tuple[Shard, list[Region]]:
    """Divide `codes`, laid out like `shard.data`, into regions.

    Return the shard of the scales that this rank saves, and the regions. cut: the blocks cut by any rank's boxes, from
    `cut_blocks`. first: index of the scale of cut[0] in the all-reduced tensor of scales.
    """
    regions, boxes, pieces = [], [], [piece for _, piece in shard.pieces(codes)]
    for number, box in enumerate(shard.boxes):
        *tops, left = box.offsets or (0,)
        for start, stop, blocks in _divide(shard.global_shape, box):
            agreed = torch.tensor(first + np.searchsorted(cut, blocks), device=codes.device)
            columns, saved = slice(start - left, stop - left), start % BLOCK == 0
            region = Region(number, columns, slot not in ZERO, saved, codes, codes, agreed)
            region.codes = region.part_of(pieces)
            block, size = start // BLOCK, (len(region.codes), -(-stop // BLOCK) - start // BLOCK)
            region.scales = codes.new_zeros(size, dtype=wide_dtype(shard))
            regions.append(region)
            if saved:
                boxes.append(Box((*tops, block), (*box.sizes[:-1], size[1])))
    *rows, width = shard.global_shape or (1,)
    shape = torch.Size([*rows, -(-width // BLOCK)])
    values = codes.new_zeros(sum(box.numel for box in boxes), dtype=wide_dtype(shard))
    kept = replace(shard, global_shape=shape, boxes=tuple(boxes), parameter=values, heads=1, boxes_on=None)
    for region, (_, piece) in zip((r for r in regions if r.saved), kept.pieces(values), strict=True):
        region.scales = piece.view(region.scales.shape)
    return kept, regions


def cut_blocks(shape: torch.Size, boxes: Iterable[Box]) -> NDArray[np.int64]:
    """Return the indices, int64 and sorted, of the blocks that boundaries of `boxes` cut.

    shape: the tensor's global shape.
    """
    cut = [blocks for box in boxes for *_, blocks in _divide(shape, box)]
    return np.unique(np.concatenate(cut)) if cut else np.empty(0, dtype=np.int64)


def _divide(shape: torch.Size, box: Box) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Divide the columns of a box into ranges of whole blocks and ranges within a cut block.

    Yield (start, stop, blocks). start, stop: columns [start, stop) of the global tensor. blocks: for a range within a cut
    block, the block's index in each row, int64 `[rows]`; for whole blocks, empty.
    """
    *counts, columns = shape or (1,)
    *tops, left = box.offsets or (0,)
    *heights, width = box.sizes or (1,)
    right = left + width
    inside = -(-left // BLOCK) * BLOCK, columns if right == columns else right // BLOCK * BLOCK
    edges = sorted({left, right, *(edge for edge in inside if left < edge < right)})
    for start, stop in itertools.pairwise(edges):
        if start % BLOCK == 0 and (stop % BLOCK == 0 or stop == columns):
            yield start, stop, np.empty(0, dtype=np.int64)
            continue
        rows = np.zeros((), dtype=np.int64)
        for top, height, count in zip(tops, heights, counts, strict=True):
            rows = rows[..., None] * count + np.arange(top, top + height)
        yield start, stop, rows.reshape(-1) * -(-columns // BLOCK) + start // BLOCK


def _decode(codes: Tensor, signed: bool) -> Tensor:
    """Map signed codes -127 ... 127 to -1 ... 1, and unsigned codes -128 ... 127 to 0 ... 1."""
    return codes * codes.abs() / 127**2 if signed else ((codes + 128) / 255) ** 4
