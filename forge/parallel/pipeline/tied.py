"""The weight that the first and the last stage share, where embedding and head are tied.

The first stage's copy is the parameter: norm, optimizers and checkpoints know it alone. The last stage's gets the same
initial values, gives its gradient to the first, and takes over the values after each update. Both are cut alike, so rank
speaks to rank; on a V-shaped schedule both copies lie on one rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from forge.shard import Shard

NAME = "embedding.weight"


class Tied:
    """`first`, `last`: this rank's shards of the two copies, or None where it has no such stage. `ends`: their pp ranks."""

    def __init__(
        self, first: Shard | None, last: Shard | None, ends: tuple[int, int], group: dist.ProcessGroup
    ):
        self._first = first if first is not None and first.boxes else None
        self._last = last if last is not None and last.boxes else None
        self._ends, self._group = ends, group
        if first is not None and last is not None:
            assert first.boxes == last.boxes

    def sum_gradients(self) -> None:
        """Add the last stage's gradient to the first's."""
        first, last = self._ends
        total = _gradient(self._first)
        found = self._bring(_gradient(self._last), total, sender=last, receiver=first)
        if total is not None and found is not None:
            total.add_(found)

    def copy_values(self) -> None:
        """Let the last stage compute with what the first stage's copy holds."""
        first, last = self._ends
        values = None if self._first is None else self._first.data
        copy = None if self._last is None else self._last.data
        found = self._bring(values, copy, sender=first, receiver=last)
        if copy is not None and found is not None:
            copy.copy_(found)

    def _bring(
        self, source: Tensor | None, target: Tensor | None, *, sender: int, receiver: int
    ) -> Tensor | None:
        """What `source` holds, on the rank that has `target`."""
        if source is not None and target is None:
            dist.send(source.contiguous(), group=self._group, group_dst=receiver)
        elif source is None and target is not None:
            source = torch.empty_like(target)
            dist.recv(source, group=self._group, group_src=sender)
        return source


def _gradient(shard: Shard | None) -> Tensor | None:
    assert shard is None or shard.grad is not None
    return None if shard is None else shard.grad
