"""What the model computes with follows the masters, bucket by bucket, while the next forward begins.

A hook in front of every part of the model waits for the buckets that the part needs, and launches the ones behind them,
in the order of forward. So a forward of any kind, of training, evaluation or generation, sees new parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from forge.parallel.buffered.buffer import BucketMemory
from forge.parallel.buffered.communication import Running, gather_parts
from forge.parallel.buffered.plan import Axes


class Gathering:
    """Of `buckets`, in the order of forward. `needs`: the modules of the model, in front of each of which a hook waits for
    the buckets of these parameters. `prefetch`: how many buckets are on their way behind the one that is waited for.

    `overlap`: else all is gathered as soon as masters have changed, and waited for.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[BucketMemory, Axes]],
        needs: Iterable[tuple[nn.Module, Iterable[str]]],
        *,
        prefetch: int,
        overlap: bool,
        stream: torch.cuda.Stream | None,
    ):
        self._buckets, self._stream = buckets, stream
        self._prefetch, self._overlap = prefetch, overlap
        number = {held.name: n for n, (memory, _) in enumerate(buckets) for held in memory.held}
        self._last = [(module, max((number[name] for name in names), default=-1)) for module, names in needs]
        # Between steps others may write into masters, as when a checkpoint is loaded: buckets that are masters themselves
        # must not be on their way then. Gloo puts back what it has read.
        written = (
            n for n, (memory, axes) in enumerate(buckets) if axes.scatter and memory.master is memory.own
        )
        self._ahead = min(prefetch, next(written, len(buckets)) - 1)
        self._hooks: list[RemovableHandle] = []
        self._running: list[Running] = []
        self._arrived = 0
        self._changed, self._begun = True, False
        self.enable_hooks()

    def enable_hooks(self) -> None:
        """Gather while forward goes on, from the next change of the masters."""
        if not self._hooks:
            self._hooks = [
                module.register_forward_pre_hook(functools.partial(self._before, last))
                for module, last in self._last
                if last >= 0
            ]

    def disable_hooks(self) -> None:
        """Gather all that is outstanding, now, and from now on whenever masters have changed."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def follow(self) -> None:
        """Masters have changed."""
        self._wait_for(len(self._running) - 1)  # what is on its way still reads from them
        self._changed = True
        if not self._begun:
            return  # other values may be loaded before the first forward
        if self._overlap and self._hooks:
            self._start()
            self._launch_up_to(self._ahead)
        else:
            self.finish()

    def start(self) -> None:
        """Launch the gathering of all buckets that is outstanding, without waiting."""
        if self._changed:
            self._start()
        self._launch_up_to(len(self._buckets) - 1)

    def finish(self) -> None:
        """Every parameter is what the masters are."""
        self.start()
        self._wait_for(len(self._buckets) - 1)

    def _before(self, last: int, _module: nn.Module, _inputs: object) -> None:
        if self._arrived > last and not self._changed:
            return
        if self._changed:
            self._start()
        self._launch_up_to(last + self._prefetch if self._overlap else len(self._buckets) - 1)
        self._wait_for(last)

    def _start(self) -> None:
        """Masters into this rank's part of every bucket; at first also from the first copy to all, to be sure."""
        if not self._begun:
            for memory, axes in self._buckets:
                for group in axes.add:
                    dist.broadcast(memory.master, group=group, group_src=0)
        self._begun = True
        apart = [memory for memory, _ in self._buckets if memory.master is not memory.own]
        for memory in apart:
            memory.own.copy_(memory.master)
        self._running, self._arrived, self._changed = [], 0, False

    def _launch_up_to(self, last: int) -> None:
        for memory, axes in self._buckets[len(self._running) : last + 1]:
            self._running.append(Running(gather_parts(memory.compute, axes.scatter), self._stream))

    def _wait_for(self, last: int) -> None:
        for running in self._running[self._arrived : last + 1]:
            running.finish()
        self._arrived = max(self._arrived, last + 1)
