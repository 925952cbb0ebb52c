"""Read quantised weights in two published formats: float8 with one scale per block, and MXFP4.

Float8 is the format of DeepSeek-V3 (arXiv:2412.19437, 3.3). A weight has two tensors: `X.weight` `[out, in]` in
float8_e4m3, and `X.weight_scale_inv` in float32 with one scale per block. A block has `weight_block_size` rows and columns;
the last blocks may be smaller. The product of an element and the scale of its block is rounded to bfloat16, as in the
program published with the weights.

MXFP4 is the format of gpt-oss's experts (OCP Microscaling Formats 1.0, 2023). A weight has two uint8 tensors. `X_blocks`
`[experts, out, in / 32, 16]` has two 4-bit numbers per byte, the first in the low half. `X_scales` `[experts, out, in / 32]`
has one exponent e per block of 32 numbers, for the scale 2^(e - 127). The product of number and scale is exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge.runtime.errors import UserError
from forge.tools.hf.safetensors import Stored

_SCALES = "_scale_inv"

# Values of the lower three bits of a 4-bit number: two of exponent, one of mantissa. The highest bit is the sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Scaled(NamedTuple):
    """A float8 weight `[out, in]` with its scales. block: rows and columns of a block. Has the interface of `Stored`."""

    numbers: Stored
    scales: Stored
    block: tuple[int, int]
    dtype: str = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.numbers.shape

    def read_into(self, out: Tensor) -> None:
        """Read the weight into `out`, a contiguous bfloat16 CPU tensor with the same number of elements."""
        numbers = self.numbers.read_bytes().view(torch.float8_e4m3fn)
        scales = torch.empty(self.scales.shape, dtype=torch.float32)
        self.scales.read_into(scales)
        rows, columns = self.block
        # Convert one row of blocks at a time: float32 temporaries take eight bytes per element.
        parts = (out.view(self.shape).split(rows), numbers.split(rows), scales)
        for weight, some, of_blocks in zip(*parts, strict=True):
            weight.copy_(some.float() * of_blocks.repeat_interleave(columns)[: some.shape[1]])


def with_scales(
    stored: Mapping[str, Stored], quantization: dict[str, Any], source: Path
) -> dict[str, Stored | Scaled]:
    """Return the tensors of a folder by name.

    The two tensors of each float8 weight become one entry, under the weight's name.

    quantization: quantization_config in the config.json `source`. Raises UserError (exit 2) if weight_block_size is not two
    sizes, if scales are missing, or if the shapes of weight and scales do not match.
    """
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise UserError(
            f"{source}: quantization_config.weight_block_size = {block!r} is not a list of two sizes"
        )
    rows, columns = block
    found: dict[str, Stored | Scaled] = dict(stored)
    for name, numbers in stored.items():
        if numbers.dtype != "F8_E4M3":
            continue
        scales = stored.get(name + _SCALES)
        if scales is None:
            raise UserError(f"{numbers.file}: {name} has no {name}{_SCALES}, which float8 needs")
        fits = len(numbers.shape) == 2 and scales.shape == (
            -(-numbers.shape[0] // rows),
            -(-numbers.shape[1] // columns),
        )
        if not fits or scales.dtype != "F32":
            raise UserError(
                f"{numbers.file}: {name} in float8 is {list(numbers.shape)} with scales {scales.dtype} "
                f"{list(scales.shape)}; needed: F32 scales, one for each block of {rows} rows and {columns} columns"
            )
        del found[name + _SCALES]
        found[name] = Scaled(numbers, scales, (rows, columns))
    return found


class Blocks(NamedTuple):
    """An MXFP4 weight, read as `[experts, in, out]` like the unquantised weight. Has the interface of `Stored`."""

    blocks: Stored
    scales: Stored
    dtype: str = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        experts, out, blocks, _ = self.blocks.shape
        return experts, 32 * blocks, out

    def read_into(self, out: Tensor) -> None:
        """Read the weight into `out`, a contiguous bfloat16 CPU tensor with the same number of elements."""
        blocks, scales = self.blocks.read_bytes(), self.scales.read_bytes()
        numbers = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=out.dtype)
        # Convert one expert at a time: temporaries take eight bytes per number.
        for weight, nibbles, exponents in zip(out.view(self.shape), blocks, scales, strict=True):
            both = torch.stack([nibbles & 15, nibbles >> 4], dim=-1).flatten(-2)  # [out, in / 32, 32]
            values = torch.ldexp(numbers[both.int()].float(), exponents.int().unsqueeze(-1) - 127)
            weight.copy_(values.flatten(1).mT)


def with_blocks(stored: Mapping[str, Stored]) -> dict[str, Stored | Blocks]:
    """Return the tensors of a folder by name. The two tensors of each MXFP4 weight become one entry, under the weight's name.

    Raises UserError (exit 2) if scales are missing, or if the shapes of blocks and scales do not match.
    """
    found: dict[str, Stored | Blocks] = dict(stored)
    for name, blocks in stored.items():
        if not name.endswith("_blocks"):
            continue
        weight = name.removesuffix("_blocks")
        scales = stored.get(f"{weight}_scales")
        if scales is None:
            raise UserError(f"{blocks.file}: {name} has no {weight}_scales, which MXFP4 needs")
        fits = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, 16)
        if not fits or blocks.dtype != "U8" or scales.dtype != "U8":
            shapes = f"{blocks.dtype} {list(blocks.shape)} and {scales.dtype} {list(scales.shape)}"
            raise UserError(
                f"{blocks.file}: {weight} in MXFP4 is {shapes}; needed: U8 [experts, out, in / 32, 16] and, for "
                "the scales, U8 [experts, out, in / 32]"
            )
        del found[name], found[f"{weight}_scales"]
        found[weight] = Blocks(blocks, scales)
    return found
