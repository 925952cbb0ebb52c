"""Find stragglers, i.e. ranks that slow the other ranks down, and the slow phase of each straggler.

Ranks wait for each other in every step, so the step time is equal on all ranks. Only the time of a rank's own work
differs: the wait for its data, the forward of one block (after its parameters are gathered), and the optimizer. The
forward is timed in the first microbatch of each step; on a GPU by CUDA events, without a synchronisation.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, median, median_low
from typing import Any

import torch
import torch.distributed as dist

from forge.config.schema import Resilience
from forge.hook import Hook
from forge.model import Transformer
from forge.resilience.elastic import leave, node_of, nodes_to_spare
from forge.runtime import compat
from forge.runtime.causes import Cause

log = logging.getLogger(__name__)

PHASES = ("data", "forward", "optimizer")
# Report a rank only if it costs at least this number of seconds per step, because smaller delays are common on a busy
# node.
LEAST_S = 0.01


class Stragglers(Hook):
    """Compares all ranks every `straggler_interval` steps, and reports stragglers (see `slow_ranks`).

    The forward of the last block of `parts` measures this rank's compute speed. Ranks of one tensor- or
    context-parallel group wait for each other in this forward, so they are slow together. `report_event(kind,
    **fields)` writes an event.
    """

    def __init__(
        self,
        config: Resilience,
        parts: Sequence[Transformer],
        device: torch.device,
        report_event: Callable[..., None],
    ):
        self._interval, self._factor = config.straggler_interval, config.straggler_factor
        self._report_event = report_event
        self._on_cuda = device.type == "cuda"
        # Phase -> (begin, end) of the phase in each step, as returned by `_now`.
        self._spans: dict[str, list[tuple[Any, Any]]] = {"forward": [], "optimizer": []}
        self._data_s: list[float] = []
        self._step_s: list[float] = []
        self._timing_forward = False
        self._drain_after = config.drain_stragglers
        self._slow_in_a_row: dict[int, int] = {}  # rank -> number of reports
        self._leaving: set[int] = set()  # nodes; the run restarts without them
        self._gathering: tuple[int, torch.Tensor, dist.Work | None] | None = None
        blocks = [(_kind(part, layer), block) for part in parts for layer, block in part.layers.items()]
        self._kind = -1
        if blocks:  # a pipeline stage may have no blocks
            self._kind, block = blocks[-1]
            block.register_forward_pre_hook(self._begin_forward)
            block.register_forward_hook(self._end_forward)

    def before_data(self, step: int) -> None:
        self._timing_forward = True
        self._step_began = time.perf_counter()

    def after_data(self, step: int) -> None:
        self._data_s.append(time.perf_counter() - self._step_began)

    def before_optimizer(self, step: int) -> None:
        self._optimizer_began = self._now()

    def after_optimizer(self, step: int) -> None:
        self._spans["optimizer"].append((self._optimizer_began, self._now()))

    def after_step(self, step: int) -> None:
        """Compare the ranks every `straggler_interval` steps.

        Collective in these steps. Does not wait: the times are read one step later.
        """
        self._timing_forward = False
        if self._gathering is not None:
            self._compare(*self._gathering)
            self._gathering = None
        self._step_s.append(time.perf_counter() - self._step_began)
        if step % self._interval == 0:
            self._gather(step)

    def _gather(self, step: int) -> None:
        forward, optimizer = (self._seconds(spans) for spans in self._spans.values())
        mine = [
            fmean(self._data_s),
            median(forward or [0.0]),
            median(optimizer or [0.0]),
            median(self._step_s),
            self._kind,
        ]
        of_all = torch.empty(dist.get_world_size() * len(mine), dtype=torch.float64)
        work = compat.all_gather_into(of_all, torch.tensor(mine, dtype=torch.float64))
        self._gathering = step, of_all, work
        self._data_s, self._step_s = [], []
        for spans in self._spans.values():
            spans.clear()

    def _compare(self, step: int, of_all: torch.Tensor, work: dist.Work | None) -> None:
        if work is not None:
            work.wait()
        if dist.get_rank() != 0 and not self._drain_after:
            return
        table = of_all.view(dist.get_world_size(), -1).tolist()
        slow = slow_ranks(table, self._factor)
        if self._drain_after:
            self._drain(step, {rank for rank, *_ in slow})
        for rank, phase, seconds, usual in slow if dist.get_rank() == 0 else ():
            log.warning(
                "rank %d is slow at step %d: its %s takes %.3g s, the median rank's %.3g s",
                *(rank, step, phase, seconds, usual),
                extra=Cause.STRAGGLER.of(rank),
            )
            self._report_event(
                Cause.STRAGGLER, step=step, rank=rank, phase=phase, seconds=seconds, median_s=usual
            )

    def _drain(self, step: int, slow: set[int]) -> None:
        """Make nodes leave the run whose ranks have been slow in several consecutive reports. Call on every rank.

        slow: the slow ranks of this report, equal on all ranks. So all ranks agree on the nodes that leave, and the run
        keeps its smallest number of nodes.
        """
        self._slow_in_a_row = {rank: self._slow_in_a_row.get(rank, 0) + 1 for rank in sorted(slow)}
        due = [rank for rank, reports in self._slow_in_a_row.items() if reports >= self._drain_after]
        # One rank of each node tells its agent.
        first = {node: rank for rank in reversed(due) if (node := node_of(rank)) not in self._leaving}
        for rank in sorted(first.values())[: max(nodes_to_spare() - len(self._leaving), 0)]:
            reports = self._slow_in_a_row.pop(rank)
            self._leaving.add(node_of(rank))
            if rank == dist.get_rank():
                log.warning(
                    "this node leaves the run at step %d: rank %d was slow in %d consecutive reports",
                    *(step, rank, reports),
                    extra=Cause.DRAINED.mark,
                )
                leave()

    def _begin_forward(self, *_: object) -> None:
        if self._timing_forward:
            self._forward_began = self._now()

    def _end_forward(self, *_: object) -> None:
        if self._timing_forward:
            self._spans["forward"].append((self._forward_began, self._now()))
            self._timing_forward = False

    def _now(self) -> Any:
        """Return the current time: in seconds on the CPU, as an event on CUDA.

        The time of an event is known once the stream has passed the event.
        """
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, spans: list[tuple[Any, Any]]) -> list[float]:
        if not self._on_cuda:
            return [ended - began for began, ended in spans]
        # The latest steps may still be running. Leave their times out, to avoid waiting.
        return [began.elapsed_time(ended) / 1e3 for began, ended in spans if ended.query()]


def _kind(part: Transformer, layer: str) -> int:
    """Return a number for the kind of a layer: its attention, and whether it has experts or predicts ahead."""
    config = part.config
    if layer in getattr(part, "ahead", ()):  # a user's model may have none
        return 0
    kinds = list(dict.fromkeys(config.pattern))
    return 1 + 2 * kinds.index(config.kind_of(int(layer))) + config.has_experts(int(layer))


def slow_ranks(table: Sequence[Sequence[float]], factor: float) -> list[tuple[int, str, float, float]]:
    """Return (rank, phase, the rank's seconds, the median rank's seconds) for each straggler.

    A straggler's delay is its time minus the median rank's. The delay makes the step more than `factor` times as long,
    and is longer than LEAST_S. table: for each rank, the seconds of data, forward, optimizer and whole step, and the kind of
    the timed layer.

    The forward of one block represents all computation: a rank's delay of a fraction f of this forward counts as a
    delay of f times the step. Only ranks with the same kind of layer are compared. A forward of 0 means that the rank has
    timed no forward.
    """
    step_s = median_low([row[len(PHASES)] for row in table])
    least = max((1 - 1 / factor) * step_s, LEAST_S)
    found = []
    for place, phase in enumerate(PHASES):
        by_kind: dict[float, list[int]] = defaultdict(list)
        for rank, row in enumerate(table):
            if row[place] or phase != "forward":
                by_kind[row[-1] if phase == "forward" else 0].append(rank)
        for ranks in by_kind.values():
            usual = median_low([table[rank][place] for rank in ranks])
            for rank in ranks:
                seconds = table[rank][place]
                more = seconds - usual
                lost = more * step_s / seconds if more > 0 and phase == "forward" else more
                if lost > least:
                    found.append((rank, phase, seconds, usual))
    return sorted(found, key=lambda one: (PHASES.index(one[1]), one[0]))
