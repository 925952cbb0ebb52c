"""Sum gradients over ranks, bucket by bucket, while backward runs.

A hook on every parameter reports its gradient. A bucket is launched once all of its gradients have arrived and all
earlier buckets have been launched. All ranks therefore issue collectives in the same order, for any order in which
backward computes gradients.

No hook reports the gradients of unused parameters, nor weight gradients computed separately by a pipeline schedule.
Both are collected after backward, when the remaining buckets are launched.

A bucket is reduced in one of two ways:

    in place   (ddp, zero1)  autograd accumulates all microbatches in the buffer. The last backward reduces the buffer
                             or, if precision.reduce is another dtype, a copy in a temporary bucket
    collected  (zero2)       each microbatch's gradients are copied into a temporary bucket and reduced; each rank adds
                             its part of the sum to its gradient buffer
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge.parallel.engines.buffered.buffer import (
    AsyncCollectives,
    BucketMemory,
    PlacedParameter,
    TemporaryBuckets,
    own_part,
    sum_to_parts,
)
from forge.runtime.errors import FAILED, UserError


class BucketGradients:
    """The gradients of one bucket during one backward."""

    def __init__(self, memory: BucketMemory):
        self.memory = memory
        self.collected = bool(memory.microbatch_groups)
        self.shared = bool(memory.plan.groups.shard or memory.plan.groups.replicate)
        self.expected = sum(placed.parameter.requires_grad for placed in memory.parameters)
        self.temporary_numel = memory.bucket.numel if self.collected or memory.plan.casts_gradients else 0
        self.temporary: Tensor | None = None
        self.forget()
        self.begin()

    def forget(self) -> None:
        """Discard the gradients without touching their memory, which the next microbatch overwrites."""
        self._empty = True
        self._separate: dict[str, Tensor] = {}
        if not self.collected:
            for placed in self.memory.parameters:
                placed.parameter.grad = None

    def move(self) -> None:
        """Under ddp and zero1, copy the gradients of the step's first backward from autograd's tensors to the buffer.

        Autograd adds the gradients of later backwards in place.
        """
        if self.collected or not self._empty:
            return
        made = []
        for placed in self.memory.parameters:
            gradient = placed.parameter.grad
            if gradient is not None and gradient is not placed.gradient:
                made.append((placed, gradient))
        if not made:
            return
        torch._foreach_copy_(
            [placed.place for placed, _ in made], [_complete(placed, gradient) for placed, gradient in made]
        )
        for placed, _ in made:
            placed.parameter.grad = placed.gradient

    def place_all(self) -> None:
        """In the step's first backward, move all gradients into the buffer, with zeros for missing gradients.

        Do nothing in later backwards of the step, and under zero2.
        """
        if self.collected or not self._empty:
            return
        self.move()
        for placed in self.memory.parameters:
            if placed.parameter.grad is None:
                placed.place.zero_()
                placed.parameter.grad = placed.gradient
        self._empty = False

    def add_separate(self) -> None:
        """Under zero2, add the gradients that no hook reports to sums in the buffer's dtype, and free `.grad`.

        Otherwise the next separate weight gradients would be added to `.grad` in its own dtype, e.g. bfloat16.
        """
        dtype = self.memory.plan.formats.gradient
        for placed in self.memory.parameters if self.collected else ():
            gradient = placed.parameter.grad
            if gradient is None or gradient.dtype == dtype:
                continue
            flat = _complete(placed, gradient).detach().reshape(-1)
            known = self._separate.get(placed.name)
            self._separate[placed.name] = flat.to(dtype) if known is None else known.add_(flat)
            placed.parameter.grad = None

    def begin(self) -> None:
        self.arrived: set[str] = set()
        self._copied: set[str] = set()
        self.launched = False

    @property
    def complete(self) -> bool:
        return len(self.arrived) == self.expected

    def arrive(self, placed: PlacedParameter) -> None:
        """Record the arrival of the parameter's gradient.

        Under zero2, copy the gradient to its slot if the temporary bucket is already allocated.
        """
        self.arrived.add(placed.name)
        if self.collected and self.temporary is not None:
            self._collect(placed)

    def collect_rest(self) -> None:
        """Under zero2, copy all remaining gradients to the temporary bucket, including those that no hook reports.

        A missing gradient counts as zeros. Call before the launch.
        """
        if self.collected:
            for placed in self.memory.parameters:
                if placed.parameter.grad is not None:
                    self._collect(placed)
                if placed.name in self._separate:
                    self._add(placed, self._separate.pop(placed.name))
                if placed.name not in self._copied:
                    self.sent(placed).zero_()

    def sent(self, placed: PlacedParameter) -> Tensor:
        """Return the parameter's slot, `[numel]`: in the temporary bucket (zero2) or in the gradient buffer (ddp, zero1)."""
        bucket = self.temporary if self.collected else self.memory.gradient
        assert bucket is not None
        return bucket[placed.slot.start - self.memory.bucket.start :][: placed.numel]

    def collectives(self, *, last: bool) -> Iterator[dist.Work]:
        """Yield the collectives that sum the bucket over ranks. last: True in the step's last backward."""
        groups, kept, temporary = self.memory.plan.groups, self.memory.gradient, self.temporary
        if temporary is None:
            yield from sum_to_parts(kept, groups.shard, groups.replicate)
        elif self.collected:
            first = self.memory.microbatch_groups
            yield from sum_to_parts(temporary, first, ())
            own = own_part(temporary, first)
            kept.copy_(own) if self._empty else kept.add_(own)
            self._empty = False
            if last:  # over the copies of the model once per step
                yield from sum_to_parts(kept, groups.shard[len(first) :], groups.replicate)
        else:
            temporary.copy_(kept)
            yield from sum_to_parts(temporary, groups.shard, groups.replicate)
            own_part(kept, groups.shard).copy_(own_part(temporary, groups.shard))

    def _collect(self, placed: PlacedParameter) -> None:
        """Add the parameter's `.grad` to its slot of the temporary bucket, and free `.grad`."""
        assert placed.parameter.grad is not None
        self._add(placed, _complete(placed, placed.parameter.grad).detach().reshape(-1))
        placed.parameter.grad = None

    def _add(self, placed: PlacedParameter, flat: Tensor) -> None:
        """Add `flat` to the parameter's slot, which may already contain a contribution reported by a hook."""
        target = self.sent(placed)
        target.add_(flat) if placed.name in self._copied else target.copy_(flat)
        self._copied.add(placed.name)


def _complete(placed: PlacedParameter, gradient: Tensor) -> Tensor:
    """Return the complete gradient of this rank's part of the parameter.

    Collective if tensor parallelism left a partial sum.
    """
    if isinstance(gradient, DTensor):
        assert isinstance(placed.parameter, DTensor)
        # Tensor parallelism may leave a partial sum. Complete the sum, as autograd does when it accumulates.
        gradient = gradient.redistribute(placements=placed.parameter.placements).to_local()
    return gradient


class Reduction:
    """Sums the gradients of `buckets`, given in the order of their completion in backward.

    overlap: run collectives during backward; otherwise wait for each. check: called with each bucket's gradients before
    they are sent. symmetric_memory: allocate temporary buckets in NCCL's symmetric memory.
    """

    def __init__(
        self,
        buckets: Sequence[BucketMemory],
        device: torch.device,
        *,
        overlap: bool,
        stream: torch.cuda.Stream | None,
        check: GradientCheck | None,
        symmetric_memory: bool = False,
    ):
        self.buckets = [BucketGradients(memory) for memory in buckets]
        sent = [bucket for bucket in self.buckets if bucket.temporary_numel]
        nbytes = [bucket.temporary_numel * bucket.memory.plan.formats.reduce.itemsize for bucket in sent]
        groups = [(*bucket.memory.plan.groups.shard, *bucket.memory.plan.groups.replicate) for bucket in sent]
        # Each group once, in the same order on all ranks.
        unique = dict.fromkeys(group for several in groups if symmetric_memory for group in several)
        self.temporary = TemporaryBuckets(nbytes, device, list(unique))
        self._overlap, self._stream, self._check = overlap, stream, check
        # The buckets to reduce in this backward, and the number already launched.
        self._due: list[BucketGradients] = []
        self._next = 0
        self._running: deque[tuple[BucketGradients, AsyncCollectives]] = deque()
        self._last = self._complete = self._begun = False
        for bucket in self.buckets:
            trained = [placed for placed in bucket.memory.parameters if placed.parameter.requires_grad]
            # An unshared bucket (no other rank has its parameters) needs no reduction. Its gradients are copied to the
            # buffer once the last of them exists, so they are in memory twice only while backward works on the bucket.
            for placed in trained if bucket.shared else trained[-1:]:
                hook = functools.partial(self._arrive, bucket, placed, placed is trained[-1])
                placed.parameter.register_post_accumulate_grad_hook(hook)

    def begin(self, *, last: bool) -> None:
        """Prepare for a backward.

        last: the backward is the last one of the optimizer step. Raises RuntimeError if gradients already summed over
        ranks have not been zeroed.
        """
        self.finish()
        if self._complete:
            raise RuntimeError(
                "gradients have been summed over ranks already; call zero_gradients() of the parallel model before the "
                "next step's backward"
            )
        if self._begun:
            self.place_gradients()
        self._last, self._begun = last, True
        self._due = [bucket for bucket in self.buckets if last or bucket.collected]
        self._next = 0
        for bucket in self._due:
            bucket.begin()

    def launch_rest(self) -> None:
        """Launch every bucket not launched during backward, complete or not."""
        while self._next < len(self._due):
            self._launch(self._due[self._next])

    def finish(self) -> None:
        """Launch the remaining buckets and wait for all of them.

        After the last backward, gradients are sums over all ranks.
        """
        if not self._due:
            return
        self.launch_rest()
        for _, collectives in self._running:
            collectives.advance()  # on the CPU, the second collectives of all buckets then run at once
        while self._running:
            self._finish_oldest()
        self.temporary.free()
        self._due, self._next, self._complete = [], 0, self._last

    def place_gradients(self) -> None:
        """Move all existing gradients into the buffers. Call between two backwards."""
        for bucket in self.buckets:
            bucket.place_all()
            bucket.add_separate()

    def forget(self) -> None:
        """Discard the gradients."""
        self._complete = self._begun = False
        for bucket in self.buckets:
            bucket.forget()

    def _arrive(
        self, bucket: BucketGradients, placed: PlacedParameter, moves: bool, _parameter: nn.Parameter
    ) -> None:
        if moves:  # backward computes the gradient of `placed` last in the bucket
            bucket.move()
        if not bucket.shared:
            return
        if not (self._last or bucket.collected):
            return
        if bucket.launched:
            raise RuntimeError(
                f"backward computed a gradient of {placed.name} after its bucket was reduced over ranks; run only "
                "one backward after each begin_microbatch()"
            )
        # Only the next two buckets get a temporary bucket. If later buckets could take both, the next two would wait
        # forever.
        if bucket.collected and bucket.temporary is None and bucket in self._due[self._next : self._next + 2]:
            self._acquire_temporary(bucket)
        bucket.arrive(placed)
        # Launch in order: a complete bucket waits for the ones before it.
        while self._next < len(self._due) and self._due[self._next].complete:
            self._launch(self._due[self._next])

    def _launch(self, bucket: BucketGradients) -> None:
        bucket.place_all()
        for placed in bucket.memory.parameters:
            placed.check()
        if bucket.temporary_numel and bucket.temporary is None:
            self._acquire_temporary(bucket)
        bucket.collect_rest()
        if self._check is not None:
            self._check([(placed.name, bucket.sent(placed)) for placed in bucket.memory.parameters])
        bucket.launched = True
        self._next += 1
        collectives = AsyncCollectives(bucket.collectives(last=self._last), self._stream)
        self._running.append((bucket, collectives))
        if not self._overlap:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        bucket, collectives = self._running.popleft()
        collectives.finish()
        if bucket.temporary is not None:
            self.temporary.release(bucket.temporary)
            bucket.temporary = None

    def _acquire_temporary(self, bucket: BucketGradients) -> None:
        while self.temporary.exhausted:
            self._finish_oldest()
        bucket.temporary = self.temporary.acquire(bucket.temporary_numel, bucket.memory.plan.formats.reduce)


class GradientCheck:
    """`parallel.check_gradients`: check each bucket's gradients before they are summed over ranks.

    finite: raise UserError (exit 1), naming parameter and rank, if a gradient is NaN or infinite. plausible: also raise
    UserError if a bucket's norm exceeds IMPLAUSIBLE times its largest norm so far. Synchronises with the device at
    every bucket.
    """

    # A bucket's norm changes by a small factor from step to step, and by about ten at a bad batch.
    IMPLAUSIBLE = 1000.0

    def __init__(self, level: Literal["finite", "plausible"]):
        self._level = level
        self._largest: dict[str, float] = {}

    def __call__(self, gradients: Sequence[tuple[str, Tensor]]) -> None:
        """Check one bucket. gradients: (parameter name, gradient) pairs."""
        norms = torch.stack(torch._foreach_norm([gradient for _, gradient in gradients])).tolist()
        for (name, _), norm in zip(gradients, norms, strict=True):
            if not isfinite(norm):
                raise self._error(name, "is not finite before the sum over ranks")
        first, norm = gradients[0][0], sum(norm**2 for norm in norms) ** 0.5
        largest = self._largest.get(first, 0.0)
        if self._level == "plausible" and largest and norm > self.IMPLAUSIBLE * largest:
            worst = max(zip(norms, gradients, strict=True), key=lambda pair: pair[0])[1][0]
            found = f"the norm of its bucket is {norm:.3g}, and the largest norm so far was {largest:.3g}"
            raise self._error(worst, f"is implausible before the sum over ranks: {found}")
        self._largest[first] = max(norm, largest)

    @staticmethod
    def _error(name: str, what: str) -> UserError:
        return UserError(
            f"the gradient of {name} on rank {dist.get_rank()} {what}. Look at that rank's data and GPU, "
            "lower optimizer.lr, or set parallel.check_gradients = none",
            exit_code=FAILED,
        )
