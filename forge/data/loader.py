"""Batches of one data rank, prefetched by a thread and moved to the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, tee
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from forge.config import StepPlan
from forge.data.dataset import PackedDataset
from forge.data.epochs import sources_of
from forge.data.read_ahead import Stall, read_samples, wait_for
from forge.data.steps import Row, StepRows, steps_from
from forge.model import IGNORE
from forge.runtime.causes import Cause
from forge.runtime.errors import caused_by


@dataclass(frozen=True)
class Batch:
    """`tokens` and `labels`: int64 `[batch, seq]`; a label is the next token or IGNORE (-100).

    `documents`: int32 `[batch, seq]`, the document of each token, or None (all tokens of a row may attend to each
    other); `positions`: int64 `[batch, seq]` or None (0, 1, ...); `sources`: int64 `[batch]`, the source of each row by its
    place in the dataset, or None; `first_sample`: the global number of row 0.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    sources: Tensor | None = None
    first_sample: int = 0

    def microbatches(self, size: int) -> Iterator[Batch]:
        """Yield views of `size` rows each, in order; the last one is smaller where `size` does not divide."""
        for start in range(0, len(self.tokens), size):
            yield self._map(itemgetter(slice(start, start + size)), self.first_sample + start)

    def to(self, device: torch.device) -> Batch:
        """Return a copy on the device, asynchronous if this batch is in pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True), self.first_sample)

    def pin_memory(self) -> Batch:
        return self._map(lambda tensor: tensor.pin_memory(), self.first_sample)

    def _map(self, function: Callable[[Tensor], Tensor], first_sample: int) -> Batch:
        made = {name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, first_sample=first_sample, **made)


class Loader:
    """Endless iterator over the batches of data rank `rank` of `ranks`, from global sample `start_sample`.

    Each step takes the next samples, `global_batch_size` or as `plan_at` has it (see `steps_from`); rank r has the r-th
    contiguous part of the rows, so the samples of a step do not depend on `ranks`. Samples that the dataset's order passes
    over are skipped. A thread prefetches `prefetch` batches; the next `next` raises its exceptions.
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
    ):
        assert global_batch_size % ranks == 0 and 0 <= rank < ranks
        steps = steps_from(
            dataset, plan_at, global_batch_size=global_batch_size, sample=start_sample, tokens=tokens
        )
        self._steps = (step.rows(rank, ranks) for step in steps)
        self._dataset, self._prefetch = dataset, max(1, prefetch)
        self._ahead = max(32, self._prefetch * (global_batch_size // ranks))
        self.stall: Stall | None = None
        """That of the last `next`, if it had to wait for long."""
        self._device = torch.device(device)
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(self._prefetch)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="forge-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._closed.is_set():
            raise StopIteration
        item, self.stall = wait_for(self._queue)
        if isinstance(item, BaseException):
            self.close()
            with caused_by(Cause.DATA):
                raise item
        return item.to(self._device)

    def close(self) -> None:
        """End the thread, also while it waits for a store; further `next` calls raise StopIteration. May be called twice."""
        self._closed.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # else pinning would make a context on device 0
            steps, ahead = tee(self._steps)
            samples = chain.from_iterable(step.reads() for step in ahead)
            with closing(read_samples(self._dataset, samples, self._ahead, self._closed)) as windows:
                while not self._closed.is_set():
                    self._put(self._batch(next(steps), windows))
        except BaseException as error:  # raised by `__next__`
            self._put(error)

    def _batch(self, step: StepRows, windows: Iterator[Row]) -> Batch:
        n, masked = len(step.samples), step.dataset.document_mask
        batch = stack_windows(step.cut(windows), n, step.seq_len, masked, step.samples[0])
        batch = replace(batch, sources=sources_of(step.dataset, step.samples))
        return batch.pin_memory() if self._device.type == "cuda" else batch

    def _put(self, item: Batch | BaseException) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue


def stack_windows(
    rows: Iterable[tuple[np.ndarray, np.ndarray | None]],
    n: int,
    seq_len: int,
    document_mask: bool,
    first_sample: int,
) -> Batch:
    """Return a CPU batch of `n` rows; missing windows and the end of a short one are padded with token 0 and IGNORE."""
    tokens = np.zeros((n, seq_len), np.int64)
    labels = np.full((n, seq_len), IGNORE, np.int64)
    documents = np.zeros((n, seq_len), np.int32) if document_mask else None
    for i, (window, owners) in enumerate(rows):
        filled = slice(len(window) - 1)
        tokens[i, filled] = window[:-1]
        labels[i, filled] = window[1:]
        if documents is not None and owners is not None:
            documents[i, filled] = owners[:-1]
            documents[i, len(window) - 1 :] = owners[-1] + 1  # padding is of no document
            # The first token of a document is not predicted from the previous document, which it cannot attend to.
            labels[i, filled][owners[1:] != owners[:-1]] = IGNORE
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        documents=None if documents is None else torch.from_numpy(documents),
        first_sample=first_sample,
    )
