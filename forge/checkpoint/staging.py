"""Staging: this rank's share of a checkpoint is copied to CPU memory, and training may go on."""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor

from forge.checkpoint.tensors import NamedTensors, ShardTensor
from forge.shard import Shard, local


class Stager:
    """Copies into buffers that it keeps from one save to the next; one staged copy is valid at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def stage(self, tensors: NamedTensors) -> dict[str, ShardTensor]:
        """Copies what this rank will write; when it returns, the originals may change."""
        staged, on_cuda = {}, False
        for name, (shard, values) in tensors.items():
            if not writes(name, shard):
                continue
            values = local(values).detach()
            buffer = self._buffer(name, values)
            buffer.copy_(values, non_blocking=True)
            on_cuda |= values.is_cuda
            staged[name] = ShardTensor(shard, buffer)
        if on_cuda:
            torch.cuda.current_stream().synchronize()
        return staged

    def _buffer(self, name: str, values: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)
            self._buffers[name] = buffer
        return buffer


def writes(name: str, shard: Shard) -> bool:
    """True on exactly one of the ranks that hold the same elements; the names are dealt out over them."""
    replicas = shard.replicas
    return replicas is None or crc32(name.encode()) % replicas.size() == replicas.rank()
