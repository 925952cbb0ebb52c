"""Collectives on a bucket, one after another, beside the computation.

A bucket is cut into parts over one or two groups of ranks, one after the other: the ranks of one copy of the model
and then, with parallel.shard_optimizer_over = "dp", the copies. `own_part` is the only place that knows the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from forge import compat

Groups = Sequence[dist.ProcessGroup]


def own_part(whole: Tensor, groups: Groups) -> Tensor:
    """The part of `whole` `[n]` that this rank keeps when it is cut over `groups`; a view."""
    for group in groups:
        whole = whole.view(group.size(), -1)[group.rank()]
    return whole


def sum_to_parts(whole: Tensor, scatter: Groups, add: Groups) -> Iterator[dist.Work]:
    """Sum `whole` over the ranks of all groups into `own_part(whole, scatter)`; what else was in `whole` is lost."""
    for group in scatter:
        part = own_part(whole, [group])
        yield compat.reduce_scatter_into(part, whole, group)
        whole = part
    for group in add:
        yield dist.all_reduce(whole, group=group, async_op=True)


def gather_parts(whole: Tensor, groups: Groups) -> Iterator[dist.Work]:
    """Fill `whole` from every rank's `own_part`."""
    for number in reversed(range(len(groups))):
        outer = own_part(whole, groups[:number])
        yield compat.all_gather_into(outer, own_part(outer, [groups[number]]), groups[number])


class Running:
    """`operations`, of which each begins when the one before it has ended. Collective.

    On CUDA (`stream` given) all are put on that stream at once, after what the current one has been given so far. On
    the CPU the first is started; the others have to wait until somebody asks.
    """

    def __init__(self, operations: Iterator[dist.Work], stream: torch.cuda.Stream | None):
        self._operations = operations
        self._work: dist.Work | None = None
        self._event: torch.cuda.Event | None = None
        if stream is None:
            self._work = next(operations, None)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for work in operations:
                work.wait()
            self._event = stream.record_event()

    def advance(self) -> None:
        """Wait for the operation that runs and start the next, on the CPU."""
        if self._work is not None:
            self._work.wait()
            self._work = next(self._operations, None)

    def finish(self) -> None:
        """What is computed from now on comes after all operations."""
        while self._work is not None:
            self.advance()
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
