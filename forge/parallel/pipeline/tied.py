"""The weight shared by the first and the last stage, if embedding and head are tied.

The first stage's copy is the parameter: the gradient norm, optimizers and checkpoints see only this copy. The last
stage's copy has the same initial values. Its gradient is added to the first stage's gradient, and each update of the
first stage's copy is copied back. Both copies are sharded in the same way, so each rank exchanges data with one rank
only. With a V-shaped schedule both copies are on one rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from forge.shard import Shard

NAME = "embedding.weight"
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Tied:
    """Keeps the first and the last stage's copy of the tied weight equal.

    first, last: this rank's shards of the two copies; None on ranks without that stage.
    ends: the pp ranks of both stages.
    watched: True: count unexpected changes of the last stage's copy between two updates, e.g. a flipped bit.
    """

    def __init__(
        self,
        first: Shard | None,
        last: Shard | None,
        ends: tuple[int, int],
        group: dist.ProcessGroup,
        *,
        watched: bool = False,
    ):
        self._first = first if first is not None and first.boxes else None
        self._last = last if last is not None and last.boxes else None
        self._ends, self._group = ends, group
        if first is not None and last is not None:
            assert first.boxes == last.boxes
        self._watched = watched and self._last is not None
        self._copied: Tensor | None = None
        self._changes: Tensor | int = 0

    def sum_gradients(self) -> None:
        """Add the gradient of the last stage's copy to the first stage's gradient. Collective over these two stages."""
        first, last = self._ends
        total = _gradient(self._first)
        found = self._move(_gradient(self._last), total, sender=last, receiver=first)
        if total is not None and found is not None:
            total.add_(found)

    def copy_values(self) -> None:
        """Copy the first stage's values to the last stage's copy. Collective over these two stages."""
        first, last = self._ends
        values = None if self._first is None else self._first.data
        copy = None if self._last is None else self._last.data
        found = self._move(values, copy, sender=first, receiver=last)
        self._count_changes()
        if copy is not None and found is not None:
            copy.copy_(found)
            self._copied = self._bits() if self._watched else None

    def take_changes(self) -> Tensor:
        """Return the number of unexpected changes of the last stage's copy since the last call. Scalar; 0 on other ranks."""
        self._count_changes()
        if self._copied is not None:
            self._copied = self._bits()  # report each change once
        changes, self._changes = self._changes, 0
        return torch.as_tensor(changes)

    def _count_changes(self) -> None:
        if self._copied is not None:
            self._changes = self._changes + (self._bits() != self._copied)

    def _bits(self) -> Tensor:
        """Return the sum of the bit patterns of the last stage's copy, read as integers.

        Any single flipped bit changes the sum. Does not synchronise with the device.
        """
        assert self._last is not None
        values = self._last.data.reshape(-1)
        return values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)

    def _move(
        self, source: Tensor | None, target: Tensor | None, *, sender: int, receiver: int
    ) -> Tensor | None:
        """Send `source` from rank `sender` to rank `receiver`. Return the tensor on these two ranks, None on others.

        source: a tensor on `sender`, None on others. target: a tensor of the same shape and dtype on `receiver`, None on
        others. If sender and receiver are one rank, nothing is sent.
        """
        if source is not None and target is None:
            dist.send(source.contiguous(), group=self._group, group_dst=receiver)
        elif source is None and target is not None:
            source = torch.empty_like(target)
            dist.recv(source, group=self._group, group_src=sender)
        return source


def _gradient(shard: Shard | None) -> Tensor | None:
    assert shard is None or shard.grad is not None
    return None if shard is None else shard.grad
