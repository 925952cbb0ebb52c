"""Which rank is slow, and at what.

Ranks wait for each other in every step, so all steps take the same time on all of them. They differ in what each does by
itself: waiting for its data, the forward of one block (once its parameters are gathered), the optimizer.
Of the first microbatch of each step this is timed; on a CUDA card by events, which nobody waits for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median, median_low
from typing import Any

import torch
import torch.distributed as dist

from forge.config.schema import Resilience
from forge.hook import Hook
from forge.model import Transformer

log = logging.getLogger(__name__)

PHASES = ("data", "forward", "optimizer")
# Seconds of a step that a rank must cost to be named: less is what any busy machine does now and then.
LEAST_S = 0.01


class Stragglers(Hook):
    """Compares all ranks every `straggler_interval` steps, and names those that make a step longer by `straggler_factor`.

    The forward of the last block of `parts` shows how fast this rank computes; its ranks of tensor and context parallelism
    wait for each other in it, so they are slow together. `report_event(kind, **fields)` writes an event.
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
        self._clock: _Clock = _CudaClock() if device.type == "cuda" else _Clock()
        self._spans: dict[str, list[Any]] = {"forward": [], "optimizer": []}
        self._data_s: list[float] = []
        self._step_s: list[float] = []
        self._armed = False
        self._gathering: tuple[int, torch.Tensor, dist.Work | None] | None = None
        blocks = [block for part in parts for block in part.layers.values()]
        if blocks:  # a stage of a pipeline may own none
            blocks[-1].register_forward_pre_hook(self._begin_forward)
            blocks[-1].register_forward_hook(self._end_forward)

    def before_data(self, step: int) -> None:
        """The step begins; its first forward is timed."""
        self._armed = True
        self._step_began = time.perf_counter()

    def after_data(self, step: int) -> None:
        self._data_s.append(time.perf_counter() - self._step_began)

    def before_optimizer(self, step: int) -> None:
        self._optimizer_began = self._clock.now()

    def after_optimizer(self, step: int) -> None:
        self._spans["optimizer"].append((self._optimizer_began, self._clock.now()))

    def after_step(self, step: int) -> None:
        """Collective every `straggler_interval` steps, but nothing waits: the times of the others are read a step later."""
        self._armed = False
        if self._gathering is not None:
            self._compare(*self._gathering)
            self._gathering = None
        self._step_s.append(time.perf_counter() - self._step_began)
        if step % self._interval == 0:
            self._gather(step)

    def _gather(self, step: int) -> None:
        forward, optimizer = (self._clock.seconds(spans) for spans in self._spans.values())
        mine = [
            fmean(self._data_s),
            median(forward or [0.0]),
            median(optimizer or [0.0]),
            median(self._step_s),
        ]
        everyones = torch.empty(dist.get_world_size() * len(mine), dtype=torch.float64)
        work = dist.all_gather_into_tensor(everyones, torch.tensor(mine, dtype=torch.float64), async_op=True)
        self._gathering = step, everyones, work
        self._data_s, self._step_s = [], []
        for spans in self._spans.values():
            spans.clear()

    def _compare(self, step: int, everyones: torch.Tensor, work: dist.Work | None) -> None:
        if work is not None:
            work.wait()
        if dist.get_rank() != 0:
            return
        table = everyones.view(dist.get_world_size(), -1).tolist()
        for rank, phase, seconds, usual in slow_ranks(table, self._factor):
            log.warning(
                "rank %d is slow at step %d: its %s takes %.3g s, the median rank's %.3g s",
                rank,
                step,
                phase,
                seconds,
                usual,
            )
            self._report_event(
                "straggler", step=step, rank=rank, phase=phase, seconds=seconds, median_s=usual
            )

    def _begin_forward(self, *_: object) -> None:
        if self._armed:
            self._spans["forward"].append((self._clock.now(), None))

    def _end_forward(self, *_: object) -> None:
        if self._armed:
            began, _end = self._spans["forward"].pop()
            self._spans["forward"].append((began, self._clock.now()))
            self._armed = False


def slow_ranks(table: Sequence[Sequence[float]], factor: float) -> list[tuple[int, str, float, float]]:
    """(rank, phase, its seconds, the median rank's) of the ranks without which a step would be shorter by `factor`.

    table: for each rank the seconds of data, forward, optimizer and of the whole step. The forward of a block stands for
    all computing: as much slower as it is, so much of the step is lost. 0 there is a rank that has timed none.
    """
    step_s = median_low([row[len(PHASES)] for row in table])
    least = max((1 - 1 / factor) * step_s, LEAST_S)
    found = []
    for place, phase in enumerate(PHASES):
        timed = [row[place] for row in table if row[place] or phase != "forward"]
        if not timed:
            continue
        usual = median_low(timed)
        for rank, row in enumerate(table):
            more = row[place] - usual
            lost = more * step_s / row[place] if more > 0 and phase == "forward" else more
            if lost > least:
                found.append((rank, phase, row[place], usual))
    return found


class _Clock:
    def now(self) -> Any:
        return time.perf_counter()

    def seconds(self, spans: list[Any]) -> list[float]:
        return [ended - began for began, ended in spans if ended is not None]


class _CudaClock(_Clock):
    """Points on the stream, whose times are known when it has come past them."""

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, spans: list[Any]) -> list[float]:
        # The latest steps may still run: their times are left out, not waited for.
        return [
            began.elapsed_time(ended) / 1e3 for began, ended in spans if ended is not None and ended.query()
        ]
