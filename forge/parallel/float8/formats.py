"""The two block formats: float8 codes (E4M3) with one scale for each block of a matrix. Tensors in, tensors out.

    blockwise  1 x 128 blocks of activations and gradients, 128 x 128 blocks of weights, scales in float32
               (DeepSeek-AI 2024, "DeepSeek-V3", arXiv:2412.19437, section 3.3.2)
    mxfp8      1 x 32 blocks of all matrices, scales are powers of two in E8M0 (Open Compute Project 2023,
               "Microscaling Formats v1.0", sections 5.1 and 6.3)

Blocks lie along the contraction, the dimension summed over by the product. The last block of a dimension may be
shorter.

Rounding, after conversion to float32:
Blockwise scale: multiplier m = float32(448 / max(amax, 1e-12)), scale = 1 / m.
MX scale: the smallest power of two with amax / scale <= 448. The scale is rounded up, like Blackwell's cvt.rp and
torchao's RCEIL; the specification's floor rule would saturate values above 448.
Codes: value / scale, saturated to +-448, rounded to the nearest code, ties to even.

A block with a NaN dequantises to NaN. A block with an infinity dequantises to non-finite values in float32. An MX block
whose scale would be 2^-127 has codes of zero, as on Blackwell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.config.float8 import BLOCKS

CODES, LARGEST = torch.float8_e4m3fn, 448.0
# The smallest amax of a blockwise block.
SMALLEST = 1e-12


class Quantised(NamedTuple):
    """A matrix in float8, as codes and scales.

    codes: E4M3 `[..., rows, columns]`. scales: `[..., row blocks, column blocks]`, float32 or E8M0.
    """

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Format:
    """A block format of float8: the size of blocks and the kind of scales.

    block: elements per block. square: weights have blocks of block x block elements. powers: scales are powers of two,
    in E8M0.
    """

    name: str
    block: int
    square: bool
    powers: bool

    def along(self, dim: int) -> tuple[int, int]:
        """Return (rows, columns) of an activation's block, for a product that sums over dimension `dim`, -1 or -2."""
        return (1, self.block) if dim == -1 else (self.block, 1)

    def of_weight(self, dim: int) -> tuple[int, int]:
        """Return (rows, columns) of a weight's block, for a product that sums over dimension `dim`, -1 or -2."""
        return (self.block, self.block) if self.square else self.along(dim)

    def quantise(self, x: Tensor, block: tuple[int, int]) -> Quantised:
        """Return codes and scales of x `[..., m, n]`. Each tile of `block[0]` x `block[1]` elements has one scale."""
        blocks = _cut(x.float(), block)  # [..., row blocks, rows, column blocks, columns]
        amax = blocks.abs().amax(dim=(-3, -1), keepdim=True)
        if self.powers:
            exponents, multipliers = _power_scales(amax)
            scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
        else:
            # The order of operations is that of torchao's kernels, so scales are equal bit for bit.
            multipliers = (LARGEST / amax.double().clamp(min=SMALLEST)).float()
            scales = 1.0 / multipliers
        codes = (blocks * multipliers).clamp(-LARGEST, LARGEST).to(CODES)
        return Quantised(_joined(codes, x.shape), scales.squeeze(-1).squeeze(-2))

    def dequantise(self, quantised: Quantised, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return codes * scales in `dtype` (float32 or float64), in the shape of the codes."""
        codes, scales = quantised
        factors = scales.float().to(dtype).unsqueeze(-1).unsqueeze(-3)
        return _joined(_cut(codes.to(dtype), block) * factors, codes.shape)

    def rounded(self, x: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return x after quantising and dequantising, in `dtype`.

        Each tile of `block[0]` x `block[1]` elements has one scale.
        """
        return self.dequantise(self.quantise(x, block), block, dtype)


BLOCKWISE = Format("blockwise", BLOCKS["blockwise"], square=True, powers=False)
MXFP8 = Format("mxfp8", BLOCKS["mxfp8"], square=False, powers=True)
FORMATS = {form.name: form for form in (BLOCKWISE, MXFP8)}


def _power_scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return each MX scale's biased exponent (int32) and reciprocal (float32) for amax (float32).

    Works on the bits of amax = (1 + mantissa) * 2^(exponent bits - 127), with 448 = 1.75 * 2^8. Unlike division, this
    arithmetic is exact on every device.
    """
    bits = amax.view(torch.int32)
    field, mantissa = bits >> 23, bits & 0x7FFFFF
    exponents = (field - 8 + (mantissa > 0x600000)).clamp(0, 254)
    infinite = (field == 255) & (mantissa == 0)
    exponents = torch.where(infinite, 254, torch.where(amax.isnan(), 255, exponents))
    powers = ((254 - exponents).clamp(min=1) << 23).view(torch.float32)
    reciprocals = torch.where(exponents == 0, 1.0, torch.where(infinite, 2.0**-127, powers))
    return exponents, torch.where(amax.isnan(), amax, reciprocals)


def _cut(x: Tensor, block: tuple[int, int]) -> Tensor:
    """x `[..., m, n]` -> `[..., row blocks, rows of a block, column blocks, columns of a block]`, padded with zeros."""
    rows, columns = block
    pad = (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows)
    if any(pad):
        x = F.pad(x, pad)
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _joined(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Undo `_cut`: return a tensor of `shape`, without the padding."""
    whole = blocks.flatten(-2).flatten(-3, -2)
    return whole[..., : shape[-2], : shape[-1]]
