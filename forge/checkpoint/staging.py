"""Host-memory copies of this rank's checkpoint tensors, for writing while training continues."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge.checkpoint.tensors import NamedTensors, ShardTensor, writes
from forge.shard import local

# PyTorch rounds pinned allocations up to a power of two, so tensors share blocks whose size is a power of two.
BLOCK = 1 << 30
_ALIGNMENT = 64


class Stager:
    """Copies tensors into CPU buffers. Every save reuses the buffers, so a copy is valid only until the next call."""

    def __init__(self) -> None:
        self._form: object = None
        self._buffers: dict[str, Tensor] = {}

    def stage(self, tensors: NamedTensors) -> dict[str, ShardTensor]:
        """Copy the tensors that this rank writes, and return the copies by name.

        Synchronises with the device. The originals may change after the return.
        """
        own = {
            name: (shard, local(values).detach())
            for name, (shard, values) in tensors.items()
            if writes(name, shard)
        }
        self._allocate({name: values for name, (_, values) in own.items()})
        for name, (_, values) in own.items():
            self._buffers[name].copy_(values, non_blocking=True)
        if any(values.is_cuda for _, values in own.values()):
            torch.cuda.current_stream().synchronize()
        return {name: ShardTensor(shard, self._buffers[name]) for name, (shard, _) in own.items()}

    def _allocate(self, tensors: dict[str, Tensor]) -> None:
        """Allocate `_buffers`: a buffer for each of `tensors`, within a few large blocks of memory.

        Do nothing if names, shapes and dtypes are unchanged.
        """
        form = [(name, values.shape, values.dtype) for name, values in tensors.items()]
        if form == self._form:
            return
        self._form, self._buffers = None, {}  # free the blocks first
        sizes, places = blocks_for([values.nbytes for values in tensors.values()])
        pinned = any(values.is_cuda for values in tensors.values())
        blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned).numpy() for size in sizes]
        for (name, values), (block, start) in zip(tensors.items(), places, strict=True):
            # Through NumPy, each buffer has its own storage. DCP would copy a slice of a larger storage before writing.
            flat = torch.from_numpy(blocks[block][start : start + values.nbytes])
            self._buffers[name] = flat.view(values.dtype).view(values.shape)
        self._form = form


def blocks_for(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the block sizes for tensors of `sizes` bytes, and (block index, first byte in the block) of each tensor.

    Block sizes are powers of two, at most BLOCK bytes unless a tensor is larger.
    """
    rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    left, blocks, used = sum(rounded), list[int](), list[int]()
    places: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    # The largest tensors first; smaller tensors then fill the remaining space.
    for number in sorted(range(len(sizes)), key=lambda number: -rounded[number]):
        size = rounded[number]
        block = next(
            (b for b, (whole, taken) in enumerate(zip(blocks, used, strict=True)) if taken + size <= whole),
            None,
        )
        if block is None:
            block = len(blocks)
            # A block is no larger than the remaining tensors together, so the last blocks are nearly full too.
            most = min(BLOCK, 1 << max(left, 1).bit_length() - 1)
            blocks.append(max(most, 1 << max(size - 1, 0).bit_length()))
            used.append(0)
        places[number] = block, used[block]
        used[block] += size
        left -= size
    return blocks, places
