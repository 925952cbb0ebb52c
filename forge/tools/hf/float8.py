"""Read float8 weights with one scale per block, the published format of DeepSeek-V3 (arXiv:2412.19437, 3.3).

A weight has two tensors: `X.weight` `[out, in]` in float8_e4m3, and `X.weight_scale_inv` in float32 with one scale per
block. A block has `weight_block_size` rows and columns; the last blocks may be smaller. The product of an element and the
scale of its block is rounded to bfloat16, as in the program published with the weights.
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
