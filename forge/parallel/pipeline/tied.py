"""The weight that the first and the last stage share, where embedding and head are tied.

The first stage's copy is the parameter: it alone is in the list of shards, so norm, optimizer and checkpoints know one.
The last stage's gets the same initial values, gives its gradient to the first, and takes over the values after each update.
Both are cut alike, so rank speaks to rank; on a V-shaped schedule both copies lie on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from forge.shard import Shard

NAME = "embedding.weight"


class Tied:
    """`first`, `last`: this rank's shards of the two copies, or None where it has no such stage. `ends`: their pp ranks."""

    def __init__(
        self, first: Shard | None, last: Shard | None, ends: tuple[int, int], group: dist.ProcessGroup
    ):
        self._first, self._last = first, last
        self._ends, self._group = ends, group
        if first is not None and last is not None:
            assert first.boxes == last.boxes

    def sum_gradients(self) -> None:
        """Add the last stage's gradient to the first's."""
        first, last = self._first, self._last
        if first is not None and first.boxes:
            assert first.grad is not None
            if last is not None:
                assert last.grad is not None
                first.grad.add_(last.grad)
            else:
                received = torch.empty_like(first.grad)
                dist.recv(received, group=self._group, group_src=self._ends[1])
                first.grad.add_(received)
        elif last is not None and last.boxes:
            assert last.grad is not None
            dist.send(last.grad.contiguous(), group=self._group, group_dst=self._ends[0])

    def copy_values(self) -> None:
        """Let the last stage compute with what the first stage's copy holds."""
        first, last = self._first, self._last
        if first is not None and first.boxes:
            if last is not None:
                last.data.copy_(first.data)
            else:
                dist.send(first.data.contiguous(), group=self._group, group_dst=self._ends[1])
        elif last is not None and last.boxes:
            received = torch.empty_like(last.data)
            dist.recv(received, group=self._group, group_src=self._ends[0])
            last.data.copy_(received)


def without_copy(shards: Sequence[Shard], *, is_first: bool) -> list[Shard]:
    """The shards of a stage that training updates: on all but the first stage without the copy."""
    return [shard for shard in shards if is_first or shard.name != NAME]
