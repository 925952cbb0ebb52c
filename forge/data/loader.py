"""Batches of one data rank, prefetched by a thread and copied to the device, under changing step sizes and mixtures.

A step of B sequences of S tokens reads the next B S / L samples, i.e. windows of L = train.seq_len tokens. Each window
is cut into L / S rows of the batch. An epoch therefore reads every token once, for any step sizes. The samples of a
step depend only on the numbers of earlier samples and tokens.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, groupby, tee
from operator import itemgetter
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from forge.batch import Batch
from forge.config import StepPlan
from forge.data.dataset import PackedDataset
from forge.data.order import Order
from forge.data.read_ahead import read_samples
from forge.model import IGNORE
from forge.runtime.causes import Cause
from forge.runtime.errors import STOPPED, UserError, caused_by
from forge.runtime.remote import waiting_for

STALL_S = 5.0
# After a request to stop: Slurm's notice is 300 s before it kills the job.
STOP_WAIT_S = 60.0
log = logging.getLogger(__name__)
Result = TypeVar("Result")
Row = tuple[np.ndarray, np.ndarray | None]


class Loader:
    """Endless iterator over the batches of data rank `rank` of `ranks`, from global sample `start_sample`.

    A step reads the next `global_batch_size` samples or, with `plan_at`, the samples of its plan (see `steps_from`).
    Rank r gets the r-th contiguous part of the step's rows, so the step's samples do not depend on `ranks`. Ranges
    skipped by the dataset's order are not read. A thread prefetches `prefetch` batches. `next` raises the thread's
    exceptions. is_stopping: see `wait_for`.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        global_batch_size: int,
        rank: int,
        ranks: int,
        start_sample: int = 0,
        device: torch.device | str = "cpu",
        prefetch: int = 2,
        plan_at: Callable[[int], StepPlan] | None = None,
        tokens: int = 0,
        is_stopping: Callable[[], bool] = lambda: False,
    ):
        assert global_batch_size % ranks == 0 and 0 <= rank < ranks
        steps = steps_from(
            dataset, plan_at, global_batch_size=global_batch_size, sample=start_sample, tokens=tokens
        )
        first = next(steps)
        self.order = first.dataset.order
        """The sample order of the last returned batch; before the first `next`, the order of the first batch."""
        self._steps = (step.rows(rank, ranks) for step in chain([first], steps))
        # Its order has sources that the checkpoint's order does not have yet.
        self._dataset, self._prefetch = first.dataset, max(1, prefetch)
        self._ahead = max(32, self._prefetch * (global_batch_size // ranks))
        self.stall: Stall | None = None
        """The stall of the last `next`; None if it did not wait long."""
        self._device, self._is_stopping = torch.device(device), is_stopping
        self._queue: queue.Queue[tuple[Batch, Order] | BaseException] = queue.Queue(self._prefetch)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="forge-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._closed.is_set():
            raise StopIteration
        item, self.stall = wait_for(self._queue, self._is_stopping)
        if isinstance(item, BaseException):
            self.close()
            with caused_by(Cause.DATA):
                raise item
        batch, self.order = item
        return batch.to(self._device)

    def close(self) -> None:
        """End the thread, even while it waits for a store. Later `next` calls raise StopIteration. May be called twice."""
        self._closed.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(
                    self._device
                )  # otherwise pinning memory would create a CUDA context on device 0
            steps, ahead = tee(self._steps)
            samples = chain.from_iterable(step.reads() for step in ahead)
            if self._dataset.is_remote:
                reads = read_samples(self._dataset, samples, self._ahead, self._closed)
            else:
                reads = (of[sample] for of, sample in samples)
            with closing(reads) as windows:
                while not self._closed.is_set():
                    step = next(steps)
                    self._put((self._batch(step, windows), step.dataset.order))
        except BaseException as error:  # raised by `__next__`
            self._put(error)

    def _batch(self, step: StepRows, windows: Iterator[Row]) -> Batch:
        n, masked = len(step.samples), step.dataset.document_mask
        batch = stack_windows(step.cut(windows), n, step.seq_len, masked, step.samples[0])
        batch = replace(batch, sources=step.sources())
        return batch.pin_memory() if self._device.type == "cuda" else batch

    def _put(self, item: tuple[Batch, Order] | BaseException) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue


@dataclass(frozen=True)
class Stall:
    """A wait for data: its duration in seconds, and the latest cause reported by the reading threads."""

    seconds: float
    cause: str


def wait_for(
    batches: queue.Queue[Result], is_stopping: Callable[[], bool] = lambda: False
) -> tuple[Result, Stall | None]:
    """Return (next item of `batches`, stall).

    The stall is None unless a store kept this call waiting for STALL_S seconds or more. During a stall, log the wait every
    STALL_S seconds.

    is_stopping: whether the run has a request to stop. Raises UserError (exit 75) if a store still does not answer
    STOP_WAIT_S seconds later. Without the data, the ranks cannot complete the step, so they cannot save.
    """
    began, cause = time.monotonic(), ""
    stopping_since: float | None = None
    while True:
        try:
            batch = batches.get(timeout=STALL_S)
        except queue.Empty:
            if now := waiting_for():
                cause = now
                waited = time.monotonic() - began
                log.warning("waiting for data for %.0f s: %s", waited, cause, extra=Cause.DATA_STALL.mark)
                if is_stopping():
                    stopping_since = stopping_since or time.monotonic()
                    if time.monotonic() - stopping_since >= STOP_WAIT_S:
                        raise UserError(
                            f"was asked to stop, but has waited for data for {waited:.0f} s: {cause}. The steps since the "
                            "last checkpoint are lost",
                            STOPPED,
                            Cause.STORE_FAILED,
                        ) from None
            continue
        return batch, Stall(time.monotonic() - began, cause) if cause else None


@dataclass(frozen=True)
class StepRows:
    """The rows of one data rank in one step.

    Row i is part `parts[i]` of global sample `samples[i]`. A part has `seq_len` tokens.
    """

    dataset: PackedDataset
    samples: list[int]
    parts: list[int]
    seq_len: int

    def reads(self) -> Iterator[tuple[PackedDataset, int]]:
        """Yield (dataset, sample number) once for each sample of these rows, in order."""
        return ((self.dataset, sample) for sample, _ in groupby(self.samples))

    def sources(self) -> Tensor:
        """Return the source of each row, as an index into `dataset.sources`: int64 `[rows]`."""
        places = {name: place for place, name in enumerate(self.dataset.sources)}
        order = self.dataset.order
        return torch.tensor([places[order.sources[order.locate(one)[0]]] for one in self.samples])

    def cut(self, windows: Iterator[Row]) -> Iterator[Row]:
        """Cut samples into rows.

        Yield each row as (tokens `[seq_len + 1]`, document of each token). A row contains inputs and labels: labels are
        the tokens shifted by one. The last row of a short sample is shorter. windows: the samples of `reads()`, in
        order.
        """
        for (_, rows), window in zip(
            groupby(zip(self.samples, self.parts, strict=True), itemgetter(0)), windows, strict=False
        ):
            for _, part in rows:
                yield part_of(window, part, self.seq_len)


def part_of(window: Row, part: int, seq_len: int) -> Row:
    """Return part number `part` of a window: `seq_len` inputs and their labels.

    Past the end of a short window, return one token without a label.
    """
    tokens, owners = window
    start = min(part * seq_len, len(tokens) - 1)
    chosen = slice(start, part * seq_len + seq_len + 1)
    return tokens[chosen], None if owners is None else owners[chosen]


@dataclass(frozen=True)
class StepSizes:
    """The samples of a step: `windows` whole samples of `dataset`, beginning with global sample `sample`.

    The samples are cut into `batch` rows of `seq_len` tokens.
    """

    dataset: PackedDataset
    sample: int
    batch: int
    seq_len: int
    windows: int

    def rows(self, rank: int, ranks: int) -> StepRows:
        """Return the rows of the step for data rank `rank` of `ranks`."""
        parts, order = self.batch // self.windows, self.dataset.order
        rows = range(rank * self.batch // ranks, (rank + 1) * self.batch // ranks)
        places = {window: order.nth(self.sample, window) for window in {row // parts for row in rows}}
        return StepRows(
            self.dataset, [places[row // parts] for row in rows], [row % parts for row in rows], self.seq_len
        )


def steps_from(
    dataset: PackedDataset,
    plan_at: Callable[[int], StepPlan] | None,
    *,
    global_batch_size: int,
    sample: int = 0,
    tokens: int = 0,
) -> Iterator[StepSizes]:
    """Yield the sizes of each step, beginning with global sample `sample`.

    tokens: number of tokens trained before the first of these steps. plan_at: maps the number of tokens before a step
    to the step's sizes and mixture; None: all steps have `global_batch_size` whole samples. When the mixture changes,
    each source continues at its position in the order of `dataset`.
    """
    batch, seq_len, windows = global_batch_size, dataset.seq_len, global_batch_size
    before: StepPlan | None = None
    while True:
        if plan_at is not None:
            plan = plan_at(tokens)
            batch, seq_len, windows = plan.global_batch_size, plan.seq_len, plan.windows
            order = dataset.order
            if before is None or plan.weights != before.weights:
                order = dataset.continuing(order, sample, plan.weights)
            if order is not dataset.order or plan.document_mask != dataset.document_mask:
                dataset = dataset.following(order, plan.document_mask, plan.weights)
            before = plan
        yield StepSizes(dataset, sample, batch, seq_len, windows)
        sample, tokens = dataset.order.nth(sample, windows), tokens + batch * seq_len


def mixtures_ahead(
    dataset: PackedDataset, ranges: Iterable[tuple[int, StepPlan]], sample: int
) -> Iterator[tuple[PackedDataset, int, int]]:
    """Yield (dataset, first sample, end sample) for each mixture of the steps of `ranges`.

    ranges: from `Phases.ranges`. sample: first global sample of the first range. Each dataset has the order that
    `steps_from` has under this mixture.
    """
    for weights, group in groupby(ranges, key=lambda one: one[1].weights):
        dataset = dataset.following(dataset.continuing(dataset.order, sample, weights), None, weights)
        end = dataset.order.nth(sample, sum(steps * plan.windows for steps, plan in group))
        yield dataset, sample, end
        sample = end


def stack_windows(
    rows: Iterable[tuple[np.ndarray, np.ndarray | None]],
    n: int,
    seq_len: int,
    document_mask: bool,
    first_sample: int,
) -> Batch:
    """Return a CPU batch of `n` rows. Missing rows and the ends of short rows are padding: token 0, label IGNORE."""
    tokens = np.zeros((n, seq_len), np.int64)
    labels = np.full((n, seq_len), IGNORE, np.int64)
    documents = np.zeros((n, seq_len), np.int32) if document_mask else None
    for i, (window, owners) in enumerate(rows):
        filled = slice(len(window) - 1)
        tokens[i, filled] = window[:-1]
        labels[i, filled] = window[1:]
        if documents is not None and owners is not None:
            documents[i, filled] = owners[:-1]
            documents[i, len(window) - 1 :] = owners[-1] + 1  # padding is a separate document
            # A document's first token is not a label, because the tokens before it are in another document.
            labels[i, filled][owners[1:] != owners[:-1]] = IGNORE
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        documents=None if documents is None else torch.from_numpy(documents),
        first_sample=first_sample,
    )
