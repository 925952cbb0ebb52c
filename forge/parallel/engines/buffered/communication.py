"""Background collectives on a bucket, and the temporary buckets used as their send buffers.

A bucket is cut into parts over one group of ranks, or over two groups in turn. The first group has the ranks of one
copy of the model. The second group, used with parallel.shard_optimizer_over = "dp", has this rank's counterpart in
every copy. Only `own_part` knows this order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from forge.runtime import compat

ProcessGroups: TypeAlias = Sequence[dist.ProcessGroup]


def own_part(whole: Tensor, groups: ProcessGroups) -> Tensor:
    """Return a view of this rank's part of `whole` `[n]`. Each group in turn splits the part left by the groups before it."""
    for group in groups:
        whole = whole.view(group.size(), -1)[group.rank()]
    return whole


def address(tensor: Tensor) -> tuple[int, int]:
    """Return the identity of the tensor's storage, and the tensor's offset in it.

    Unlike `data_ptr`, the function also works for fake tensors.
    """
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def sum_to_parts(whole: Tensor, shard: ProcessGroups, replicate: ProcessGroups) -> Iterator[dist.Work]:
    """Sum `whole` over the ranks of all groups into `own_part(whole, shard)`.

    Overwrites the rest of `whole`. Yields each started collective; the caller waits for it before taking the next.
    """
    for group in shard:
        part = own_part(whole, [group])
        yield compat.reduce_scatter_into(part, whole, group)
        whole = part
    for group in replicate:
        yield dist.all_reduce(whole, group=group, async_op=True)


def gather_parts(whole: Tensor, shard: ProcessGroups) -> Iterator[dist.Work]:
    """All-gather every rank's `own_part` into `whole`. Yields collectives as `sum_to_parts` does."""
    for number in reversed(range(len(shard))):
        outer = own_part(whole, shard[:number])
        yield compat.all_gather_into(outer, own_part(outer, [shard[number]]), shard[number])


class AsyncCollectives:
    """Collectives that run one after another.

    On CUDA the constructor enqueues all of them on `stream`, after the work already in the current stream. On the CPU
    (no stream) the constructor starts the first collective; `advance` and `finish` start the others.
    """

    def __init__(self, collectives: Iterator[dist.Work], stream: torch.cuda.Stream | None):
        self._collectives = collectives
        self._work: dist.Work | None = None
        self._event: torch.cuda.Event | None = None
        if stream is None:
            self._work = next(collectives, None)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for work in collectives:
                work.wait()
            self._event = stream.record_event()

    def advance(self) -> None:
        """On the CPU, wait for the running collective and start the next one. On CUDA, do nothing."""
        if self._work is not None:
            self._work.wait()
            self._work = next(self._collectives, None)

    def finish(self) -> None:
        """Make later computation on this device wait for the results. On the CPU, first run the remaining collectives."""
        while self._work is not None:
            self.advance()
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class TemporaryBuckets:
    """At most two temporary buckets, shared by all buckets of an engine.

    sizes: bytes needed by each bucket. Memory is allocated at its first use and kept until `free`. With `symmetric`
    groups, the constructor allocates the groups' symmetric memory, and `free` has no effect.
    """

    def __init__(self, sizes: Collection[int], device: torch.device, symmetric: ProcessGroups = ()):
        self._limit, self._nbytes, self._device = min(2, len(sizes)), max(sizes, default=0), device
        self._free: list[Tensor] = []
        self._registered = bool(symmetric)
        with compat.communication_memory(device, symmetric, symmetric=self._registered):
            if self._registered:
                self._free = [self._allocate() for _ in range(self._limit)]
        self._used: dict[tuple[int, int], Tensor] = {}
        self.nbytes = self._limit * self._nbytes
        self.peak = 0
        """Largest number of temporary buckets allocated at once."""

    @property
    def exhausted(self) -> bool:
        return len(self._used) == self._limit

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor `[numel]` of `dtype`. The caller passes the tensor to `release` after use."""
        assert not self.exhausted and numel * dtype.itemsize <= self._nbytes
        if not self._free:
            self._free.append(self._allocate())
        memory = self._free.pop()
        self._used[address(memory)] = memory
        self.peak = max(self.peak, len(self._used) + len(self._free))
        return memory[: numel * dtype.itemsize].view(dtype)

    def release(self, bucket: Tensor) -> None:
        self._free.append(self._used.pop(address(bucket)))

    def free(self) -> None:
        """Free the memory of released buckets, unless it is registered with NCCL."""
        if not self._registered:
            self._free.clear()

    def _allocate(self) -> Tensor:
        return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
