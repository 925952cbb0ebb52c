"""Gradients become sums over ranks, bucket by bucket, while backward goes on.

A hook on every parameter tells when its gradient is there. A bucket is launched when all of its gradients are, and when
every bucket before it has been launched: so the order of collectives is the same on all ranks, whatever backward
does. What no hook reported (an unused parameter, weight gradients that a pipeline schedule computes by themselves) is
launched at the end.

ddp and zero1 add up gradients of all microbatches in the buffer and reduce it in the last backward. zero2 copies each
gradient into one of two temporary buckets, reduces that in every microbatch, and adds up what this rank keeps.
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
    """A bucket on its way through one backward."""

    def __init__(self, buffer: Buffer, memory: BucketMemory):
        self.buffer, self.memory = buffer, memory
        self.expected = sum(held.parameter.requires_grad for held in memory.held)
        self.arrived: set[str] = set()
        self.launched = False
        self.temporary: Tensor | None = None

    @property
    def complete(self) -> bool:
        return len(self.arrived) == self.expected

    def begin(self) -> None:
        self.arrived.clear()
        self.launched = False

    def part_of(self, bucket: Tensor, held: Held) -> Tensor:
        """Where the parameter lies in `bucket`, flat."""
        return bucket[held.slot.start - self.memory.bucket.start :][: held.numel]


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
        self._next = 0
        self._running: deque[tuple[Entry, Running]] = deque()
        self._active = self._last = self._complete = False
        for entry in entries:
            for held in entry.memory.held:
                if held.parameter.requires_grad:
                    take = functools.partial(self._take, entry, held)
                    held.parameter.register_post_accumulate_grad_hook(take)

    each_microbatch: bool

    def _take(self, entry: Entry, held: Held, parameter: nn.Parameter) -> None:
        """Backward has put the microbatch's gradient into `parameter.grad`, or added it to what was there."""
        raise NotImplementedError

    def _operations(self, entry: Entry) -> Iterator[dist.Work]:
        """What sums the bucket, whatever of it has arrived."""
        raise NotImplementedError

    def _sent(self, entry: Entry, held: Held) -> Tensor:
        """The gradient of one parameter as it will be sent, flat."""
        raise NotImplementedError

    def begin(self, *, last: bool) -> None:
        """A backward is to come; `last`: of the optimizer step."""
        self.finish()
        if self._complete:
            raise RuntimeError(
                "gradients have been summed over ranks already; call zero_gradients() of the parallel model before the "
                "next step's backward"
            )
        self._last = last
        self._active = last or self.each_microbatch
        if self._active:
            self._next = 0
            for entry in self.entries:
                entry.begin()

    def launch_rest(self) -> None:
        """Launch every bucket that is not on its way yet, complete or not."""
        while self._active and self._next < len(self.entries):
            self._launch(self.entries[self._next])

    def finish(self) -> None:
        """Launch what is left, and wait: after the last backward, gradients are sums over all ranks."""
        if not self._active:
            return
        self.launch_rest()
        for _, running in self._running:
            running.advance()  # on the CPU: so that the second operations of all run at once
        while self._running:
            self._finish_oldest()
        self._pool.clear()
        self._active, self._complete = False, self._last

    def forget(self) -> None:
        """Gradients have been zeroed."""
        self._complete = False

    def _arrive(self, entry: Entry, held: Held) -> None:
        if entry.launched:
            raise RuntimeError(f"a gradient of {held.name} came after its bucket had been sent")
        entry.arrived.add(held.name)
        while self._next < len(self.entries) and self.entries[self._next].complete:
            self._launch(self.entries[self._next])

    def _launch(self, entry: Entry) -> None:
        operations = self._operations(entry)
        if self._check is not None:
            self._check([(held.name, self._sent(entry, held)) for held in entry.memory.held])
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
        """A temporary bucket, in the format in which gradients travel."""
        while self._pool.full:
            self._finish_oldest()
        formats, numel = entry.buffer.plan.formats, entry.memory.bucket.numel
        entry.temporary = self._pool.take(numel, formats.reduce)


class InPlace(Reduction):
    """ddp and zero1: gradients of all microbatches add up in the buffer, which is reduced in the last backward."""

    each_microbatch = False

    def _take(self, entry: Entry, held: Held, _parameter: nn.Parameter) -> None:
        held.check()
        if self._active:
            self._arrive(entry, held)

    def _sent(self, entry: Entry, held: Held) -> Tensor:
        return entry.part_of(entry.memory.gradient, held)

    def _operations(self, entry: Entry) -> Iterator[dist.Work]:
        plan, gradient = entry.buffer.plan, entry.memory.gradient
        groups = plan.axes.scatter
        if not plan.narrowed:
            return sum_to_parts(gradient, groups, plan.axes.add)
        self._borrow(entry)
        return self._cast(entry)

    def _cast(self, entry: Entry) -> Iterator[dist.Work]:
        sent, axes = entry.temporary, entry.buffer.plan.axes
        assert sent is not None
        sent.copy_(entry.memory.gradient)
        yield from sum_to_parts(sent, axes.scatter, axes.add)
        own_part(entry.memory.gradient, axes.scatter).copy_(own_part(sent, axes.scatter))


class Scattered(Reduction):
    """zero2: each microbatch's gradients are copied into a temporary bucket, reduced, and added to what is kept."""

    each_microbatch = True

    def _take(self, entry: Entry, held: Held, _parameter: nn.Parameter) -> None:
        held.check()
        # Only the next two to be launched have a place: others could hold both places while these have none. Until
        # then a gradient stays where autograd has put it.
        if entry.temporary is None and entry in self.entries[self._next : self._next + 2]:
            self._borrow(entry)
        if entry.temporary is not None:
            _move(held, self._sent(entry, held))
        self._arrive(entry, held)

    def _sent(self, entry: Entry, held: Held) -> Tensor:
        assert entry.temporary is not None
        return entry.part_of(entry.temporary, held)

    def _operations(self, entry: Entry) -> Iterator[dist.Work]:
        if entry.temporary is None:
            self._borrow(entry)
        for held in entry.memory.held:
            if held.parameter.grad is not None:
                _move(held, self._sent(entry, held))
            elif held.name not in entry.arrived:
                self._sent(entry, held).zero_()
        return self._added(entry, self._last)

    def _added(self, entry: Entry, last: bool) -> Iterator[dist.Work]:
        sent, kept, axes = entry.temporary, entry.memory.gradient, entry.buffer.plan.axes
        groups = entry.buffer.microbatch_groups
        assert sent is not None
        yield from sum_to_parts(sent, groups, ())
        kept.add_(own_part(sent, groups))
        if last:
            yield from sum_to_parts(kept, axes.scatter[len(groups) :], axes.add)


def _move(held: Held, target: Tensor) -> None:
    """The gradient of the parameter into `target`, flat."""
    gradient = held.parameter.grad
    if isinstance(gradient, DTensor):
        assert isinstance(held.parameter, DTensor)
        # A sum that tensor parallelism has left open is completed; as autograd does where it adds to what is there.
        gradient = gradient.redistribute(placements=held.parameter.placements).to_local()
    assert gradient is not None
    target.copy_(gradient.detach().reshape(-1))
    held.parameter.grad = None
