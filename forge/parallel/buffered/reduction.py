"""Gradients become sums over ranks, bucket by bucket, while backward goes on.

A hook on every parameter tells when its gradient is there. A bucket is launched when all of its gradients are, and when
every bucket before it has been launched: so the order of collectives is the same on all ranks, whatever backward
does. What no hook reported (an unused parameter, weight gradients that a pipeline schedule computes by themselves) is
launched at the end.

ddp and zero1 add up gradients of all microbatches in the buffer and reduce it in the last backward. zero2 copies each
gradient into one of two temporary buckets, reduces that in every microbatch, and adds up what this rank keeps; what no
other rank shares lies as in zero1.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge.parallel.buffered.buffer import BucketMemory, Buffer, Held
from forge.parallel.buffered.check import GradientCheck
from forge.parallel.buffered.communication import Running, own_part, sum_to_parts
from forge.parallel.buffered.pool import Pool


class Entry:
    """A bucket on its way through one backward. Whether it is summed in every microbatch is the subclass's."""

    each_microbatch: bool

    def __init__(self, buffer: Buffer, memory: BucketMemory):
        self.buffer, self.memory = buffer, memory
        self.expected = sum(held.parameter.requires_grad for held in memory.held)
        self.arrived: set[str] = set()
        self.launched = False
        self.temporary: Tensor | None = None

    @property
    def complete(self) -> bool:
        return len(self.arrived) == self.expected

    @property
    def borrowed_numel(self) -> int:
        """Elements of the temporary bucket that it needs, in the format in which gradients travel."""
        raise NotImplementedError

    @property
    def borrowed_nbytes(self) -> int:
        return self.borrowed_numel * self.buffer.plan.formats.reduce.itemsize

    def begin(self) -> None:
        self.arrived.clear()
        self.launched = False

    def take(self, held: Held) -> None:
        """Backward has put the microbatch's gradient into the parameter's `.grad`, or added it to what was there."""

    def sent(self, held: Held) -> Tensor:
        """The gradient of one parameter as it will be sent, flat."""
        raise NotImplementedError

    def operations(self, *, last: bool) -> Iterator[dist.Work]:
        """What sums the bucket, whatever of it has arrived; `last`: for good."""
        raise NotImplementedError

    def _part(self, bucket: Tensor, held: Held) -> Tensor:
        """Where the parameter lies in `bucket`, flat."""
        return bucket[held.slot.start - self.memory.bucket.start :][: held.numel]


class InPlace(Entry):
    """Gradients of all microbatches add up in the buffer, which is reduced in the last backward."""

    each_microbatch = False

    @property
    def borrowed_numel(self) -> int:
        return self.memory.bucket.numel if self.buffer.plan.narrowed else 0

    def sent(self, held: Held) -> Tensor:
        return self._part(self.memory.gradient, held)

    def operations(self, *, last: bool) -> Iterator[dist.Work]:
        axes = self.buffer.plan.axes
        if self.temporary is None:
            return sum_to_parts(self.memory.gradient, axes.scatter, axes.add)
        return self._cast(self.temporary)

    def _cast(self, sent: Tensor) -> Iterator[dist.Work]:
        axes = self.buffer.plan.axes
        sent.copy_(self.memory.gradient)
        yield from sum_to_parts(sent, axes.scatter, axes.add)
        own_part(self.memory.gradient, axes.scatter).copy_(own_part(sent, axes.scatter))


class Scattered(Entry):
    """Each microbatch's gradients are copied into a temporary bucket, reduced, and added to what is kept."""

    each_microbatch = True

    def __init__(self, buffer: Buffer, memory: BucketMemory):
        super().__init__(buffer, memory)
        self.moved: set[str] = set()

    def begin(self) -> None:
        super().begin()
        self.moved.clear()

    @property
    def borrowed_numel(self) -> int:
        return self.memory.bucket.numel

    def take(self, held: Held) -> None:
        if self.temporary is not None:  # else it stays where autograd has put it
            _move(held, self.sent(held), add=held.name in self.moved)
            self.moved.add(held.name)

    def sent(self, held: Held) -> Tensor:
        assert self.temporary is not None
        return self._part(self.temporary, held)

    def operations(self, *, last: bool) -> Iterator[dist.Work]:
        assert self.temporary is not None
        for held in self.memory.held:
            if held.parameter.grad is not None:
                _move(held, self.sent(held), add=held.name in self.moved)
            elif held.name not in self.moved:
                self.sent(held).zero_()
        return self._added(self.temporary, last)

    def _added(self, sent: Tensor, last: bool) -> Iterator[dist.Work]:
        kept, axes, groups = self.memory.gradient, self.buffer.plan.axes, self.buffer.microbatch_groups
        yield from sum_to_parts(sent, groups, ())
        kept.add_(own_part(sent, groups))
        if last:
            yield from sum_to_parts(kept, axes.scatter[len(groups) :], axes.add)


class Reduction:
    """Of `entries`, in the order in which backward is done with them.

    `overlap`: collectives go on beside backward; else each is waited for. `check` sees what is sent.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        pool: Pool,
        *,
        overlap: bool,
        stream: torch.cuda.Stream | None,
        check: GradientCheck | None,
    ):
        self.entries = entries
        self._pool, self._overlap, self._stream, self._check = pool, overlap, stream, check
        self._due: list[Entry] = []
        self._next = 0
        self._running: deque[tuple[Entry, Running]] = deque()
        self._last = self._complete = False
        for entry in entries:
            for held in entry.memory.held:
                if held.parameter.requires_grad:
                    take = functools.partial(self._take, entry, held)
                    held.parameter.register_post_accumulate_grad_hook(take)

    def begin(self, *, last: bool) -> None:
        """A backward is to come; `last`: of the optimizer step."""
        self.finish()
        if self._complete:
            raise RuntimeError(
                "gradients have been summed over ranks already; call zero_gradients() of the parallel model before the "
                "next step's backward"
            )
        self._last = last
        self._due = [entry for entry in self.entries if last or entry.each_microbatch]
        self._next = 0
        for entry in self._due:
            entry.begin()

    def launch_rest(self) -> None:
        """Launch every bucket that is not on its way yet, complete or not."""
        while self._next < len(self._due):
            self._launch(self._due[self._next])

    def finish(self) -> None:
        """Launch what is left, and wait: after the last backward, gradients are sums over all ranks."""
        if not self._due:
            return
        self.launch_rest()
        for _, running in self._running:
            running.advance()  # on the CPU: so that the second operations of all run at once
        while self._running:
            self._finish_oldest()
        self._pool.clear()
        self._due, self._next, self._complete = [], 0, self._last

    def forget(self) -> None:
        """Gradients have been zeroed."""
        self._complete = False

    def _take(self, entry: Entry, held: Held, _parameter: nn.Parameter) -> None:
        held.check()
        if not (self._last or entry.each_microbatch):
            return
        if entry.launched:
            raise RuntimeError(f"a gradient of {held.name} came after its bucket had been sent")
        # Only the next two to be launched have a place: others could hold both places while these have none.
        if (
            entry.each_microbatch
            and entry.temporary is None
            and entry in self._due[self._next : self._next + 2]
        ):
            self._borrow(entry)
        entry.take(held)
        entry.arrived.add(held.name)
        while self._next < len(self._due) and self._due[self._next].complete:
            self._launch(self._due[self._next])

    def _launch(self, entry: Entry) -> None:
        if entry.borrowed_numel and entry.temporary is None:
            self._borrow(entry)
        operations = entry.operations(last=self._last)
        if self._check is not None:
            self._check([(held.name, entry.sent(held)) for held in entry.memory.held])
        entry.launched = True
        self._next += 1
        self._running.append((entry, Running(operations, self._stream)))
        if not self._overlap:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        entry, running = self._running.popleft()
        running.finish()
        if entry.temporary is not None:
            self._pool.give(entry.temporary)
            entry.temporary = None

    def _borrow(self, entry: Entry) -> None:
        while self._pool.full:
            self._finish_oldest()
        entry.temporary = self._pool.take(entry.borrowed_numel, entry.buffer.plan.formats.reduce)


def _move(held: Held, target: Tensor, *, add: bool) -> None:
    """The gradient of the parameter into `target`, flat; `add`: to what is there."""
    gradient = held.parameter.grad
    if isinstance(gradient, DTensor):
        assert isinstance(held.parameter, DTensor)
        # A sum that tensor parallelism has left open is completed; as autograd does where it adds to what is there.
        gradient = gradient.redistribute(placements=held.parameter.placements).to_local()
    assert gradient is not None
    flat = gradient.detach().reshape(-1)
    target.add_(flat) if add else target.copy_(flat)
    held.parameter.grad = None
