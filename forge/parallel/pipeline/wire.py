"""What stages hand to each other: activations forward, their gradients back; sent only where the neighbour is elsewhere."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor


class Key(NamedTuple):
    """`kind` F: the input of `stage`. B: the gradient of its output."""

    kind: str
    stage: int
    microbatch: int


class Wire:
    """The messages of one pass through the pipeline over `group`, whose rank r holds the stages with rank_of[stage] = r.

    Nothing waits but `take`, for the one tensor that it returns.
    """

    def __init__(self, group: dist.ProcessGroup, rank_of: tuple[int, ...], device: torch.device):
        self._group, self._rank_of, self._device = group, rank_of, device
        self._left: dict[Key, Tensor] = {}
        self._coming: dict[Key, tuple[dist.Work, Tensor]] = {}
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def put(self, key: Key, tensor: Tensor) -> None:
        """Leave `tensor` for the stage of `key`, on this rank or for a `send` to come."""
        self._left[key] = tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor

    def take(self, key: Key) -> Tensor:
        """What was left or received for `key`; nobody else gets it."""
        if key in self._left:
            return self._left.pop(key)
        work, tensor = self._coming.pop(key)
        work.wait()
        return tensor

    def send(self, key: Key) -> None:
        """Send what was left for the stage of `key` to its rank."""
        tensor = self._left.pop(key).contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=self._rank_of[key.stage])
        assert work is not None
        self._sent.append((work, tensor))
        # What has gone needs no memory; only the end of the pass waits for the rest.
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def receive(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Begin to receive what another rank sends for the stage of `key`."""
        source = self._rank_of[key.stage - 1 if key.kind == "F" else key.stage + 1]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        work = dist.irecv(tensor, group=self._group, group_src=source)
        assert work is not None
        self._coming[key] = work, tensor

    def close(self) -> None:
        """Wait until all is sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        assert not (self._left or self._coming), "messages that nobody took"
