"""Gather compute weights from the masters, bucket by bucket, while the next forward runs.

All gathers are launched in the order of forward, as soon as the masters are updated. A later launch would save no
memory, because buckets are always allocated. A pre-forward hook of each submodule waits for the submodule's buckets. So
every forward, in training, evaluation or generation, computes with the latest parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge.parallel.engines.buffered.buffer import BucketMemory, Buffer
from forge.parallel.engines.buffered.communication import AsyncCollectives, gather_parts
from forge.parallel.engines.buffered.layout import PART_ALIGNMENT, round_up


class Gathering:
    """Gathers `buckets`, given in the order of forward, from the masters (the master copies of the parameters).

    needs: modules of the model, each with the names of the parameters to gather before its forward. overlap: True: gather
    during forward. False: gather everything and wait, as soon as the masters have changed.
    """

    def __init__(
        self,
        buckets: Sequence[BucketMemory],
        needs: Iterable[tuple[nn.Module, Iterable[str]]],
        *,
        overlap: bool,
        stream: torch.cuda.Stream | None,
    ):
        self._buckets, self._stream, self._overlap = buckets, stream, overlap
        # Buckets are launched in order and arrive in order. self._arrived: number of arrived buckets.
        self._launched: list[AsyncCollectives] = []
        self._arrived = 0
        self._changed, self._begun = True, False
        # Parameters whose compute weights the optimizer has already written.
        self._copied: Collection[Tensor] = ()
        # Between steps a checkpoint may be loaded into the master copies. If a bucket's master is a view of `compute`, a
        # running gather would overwrite the loaded values (gloo writes back the values that it has read). The first
        # such bucket and all later ones are therefore not gathered before the next forward.
        in_place = [bool(m.plan.groups.shard) and m.master is m.own for m in buckets]
        self._early = in_place.index(True) if True in in_place else len(buckets)

        number = {placed.name: n for n, memory in enumerate(buckets) for placed in memory.parameters}
        for module, names in needs:
            last = max((number[name] for name in names), default=-1)
            if last >= 0:
                module.register_forward_pre_hook(functools.partial(self._before_forward, last))

    def after_update(self, copied: Collection[Tensor]) -> None:
        """Record that the master copies have changed, and launch the first gathers.

        copied: parameters whose compute weights the update has already written on this rank.
        """
        self.wait()
        self._changed, self._copied = True, copied
        if not self._begun:
            return  # other values may be loaded before the first forward
        if self._overlap:
            self._restart()
            self._launch(self._early)
        else:
            self.finish()

    def wait(self) -> None:
        """Wait for the running gathers. Call before writing the master copies or their compute weights."""
        self._wait_for(len(self._launched) - 1)

    def finish(self) -> None:
        """Gather all buckets and wait. Every compute parameter of the model then equals its master copy. Collective."""
        self._gather(len(self._buckets) - 1)

    def _before_forward(self, last: int, _module: nn.Module, _inputs: object) -> None:
        self._gather(last if self._overlap else len(self._buckets) - 1)

    def _gather(self, last: int) -> None:
        """Launch all gathers. Wait for the buckets 0 to `last`."""
        if self._changed:
            self._restart()
        elif self._arrived > last:
            return
        self._launch(len(self._buckets))
        self._wait_for(last)

    def _restart(self) -> None:
        """Copy the master copies into this rank's part of each bucket, and mark all buckets to be gathered again.

        A bucket is not copied if its master is a view of the part, or if the optimizer has already written the part.
        The first call is collective: it broadcasts the master copies, so replicas begin equal.
        """
        if not self._begun:
            # Replicas of a part begin with the values of the group's first rank.
            for memory in self._buckets:
                for group in memory.plan.groups.replicate:
                    dist.broadcast(memory.master, group=group, group_src=0)
            self._copied = ()
        self._begun = True
        for memory in self._buckets:
            if memory.master is not memory.own and not memory.is_copied(self._copied):
                memory.own.copy_(memory.master)
        self._launched, self._arrived, self._changed = [], 0, False

    def _launch(self, number: int) -> None:
        """Launch the gathers of the first `number` buckets, except those already launched."""
        for memory in self._buckets[len(self._launched) : number]:
            gather = gather_parts(memory.compute, memory.plan.groups.shard)
            self._launched.append(AsyncCollectives(gather, self._stream))

    def _wait_for(self, last: int) -> None:
        for collectives in self._launched[self._arrived : last + 1]:
            collectives.finish()
        self._arrived = max(self._arrived, last + 1)


class Fingerprints:
    """Fingerprints of each step's weights, to check that ranks have computed with equal weights.

    A flipped bit in one rank's weights corrupts the gradients of one step. The next gather overwrites the bit, so a
    comparison of the weights at a save does not detect it. Therefore each step adds up the bits of its weights, in one
    pass.
    """

    # Odd, so that multiplying by it modulo 2^64 loses nothing (the multiplier of Knuth's MMIX generator).
    MULTIPLIER = 6364136223846793005

    def __init__(self, buffers: Sequence[Buffer]):
        self._weights: list[tuple[str, Tensor, dist.ProcessGroup]] = []
        for buffer in buffers:
            group = buffer.plan.groups.same_weights
            if group.size() == 1:
                continue
            for slot in (slot for bucket in buffer.plan.buckets for slot in bucket.slots):
                # Including the zeros after the slot, which fill its last 64-bit word.
                values = buffer.compute[slot.start :][: round_up(slot.stop - slot.start, PART_ALIGNMENT)]
                self._weights.append((slot.name, values.view(torch.int64), group))
        self._sums: Tensor | int = 0

    def add(self) -> None:
        """Add the bits of the current weights to the fingerprints. Does not synchronise with the device."""
        if self._weights:
            sums = torch.stack([words.sum() for _, words, _ in self._weights])
            self._sums = self._sums * self.MULTIPLIER + sums

    def take(self) -> Iterator[tuple[str, Tensor, dist.ProcessGroup]]:
        """Yield (name, fingerprint of all steps since the last `take`, group).

        Ranks of a group should have equal fingerprints.
        """
        sums, self._sums = self._sums, 0
        for number, (name, _, group) in enumerate(self._weights):
            assert isinstance(sums, Tensor), "nothing was added"
            yield f"weights.{name}", sums[number], group
