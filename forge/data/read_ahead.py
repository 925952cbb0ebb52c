"""Read-ahead: threads read samples of remote sources in the global order."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent import futures
from functools import partial
from typing import TypeVar

import numpy as np

from forge.data.dataset import PackedDataset
from forge.data.format import TokenDataset
from forge.data.permutation import Permutation
from forge.runtime.remote import give_up_on

THREADS = 32
_POLL_S = 0.1
Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], ahead: int, closed: threading.Event | None = None
) -> Iterator[Result]:
    """Yield `work(item)` for each item, in order.

    Threads work on up to `ahead` items at once. Closing the generator ends the threads. Raises CancelledError once
    `closed` is set, even while a store is slow. The threads are daemons, so neither this generator nor the process
    waits for outstanding requests.
    """
    ended = threading.Event()
    tasks: queue.SimpleQueue[tuple[futures.Future[Result], Item] | None] = queue.SimpleQueue()
    under_way: deque[futures.Future[Result]] = deque()

    def serve() -> None:
        give_up_on(ended)
        for future, item in iter(tasks.get, None):
            if ended.is_set():
                return
            try:
                future.set_result(work(item))
            except BaseException as error:  # raised again by `result()`
                future.set_exception(error)

    def take() -> Result:
        while not under_way[0].done():
            if closed is not None and closed.is_set():
                raise futures.CancelledError
            futures.wait([under_way[0]], _POLL_S)
        return under_way.popleft().result()

    threads = min(THREADS, ahead)
    for number in range(threads):
        threading.Thread(target=serve, name=f"forge-read-ahead-{number}", daemon=True).start()
    try:
        for item in items:
            under_way.append(futures.Future())
            tasks.put((under_way[-1], item))
            if len(under_way) >= ahead:
                yield take()
        while under_way:
            yield take()
    finally:
        ended.set()
        for _ in range(threads):
            tasks.put(None)


def read_samples(
    dataset: PackedDataset, samples: Iterable[tuple[PackedDataset, int]], ahead: int, closed: threading.Event
) -> Generator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield the sample of each pair (dataset, sample number) in `samples`, in order. At least one source must be remote.

    Up to `ahead` samples of remote sources are read at once. All datasets must have the sources of `dataset`, but may
    have other orders and masks. closed: ends a wait, see `in_order`.
    """
    reading = [(dataset, 0)]
    for name, windows in dataset.samples.items():
        if isinstance(windows.source, TokenDataset) and windows.over(np.zeros(1), np.ones(1)) is not None:
            windows.source.next_use = partial(_next_use, name, reading)

    def followed() -> Iterator[tuple[PackedDataset, int]]:
        for of, sample in samples:
            reading[0] = of, sample
            yield of, sample

    yield from in_order(lambda pair: pair[0][pair[1]], followed(), ahead, closed)


def _next_use(
    name: str, reading: list[tuple[PackedDataset, int]], first: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Return the approximate number of global samples until the next read of each range of tokens [first, end).

    reading: one entry, the dataset and the sample that are read now. Infinite for a source that the mixture leaves out.
    """
    dataset, sample = reading[0]
    order, windows = dataset.order, dataset.samples[name]
    number, weights = order.sources.index(name), order.weights_at(sample)
    if not weights[number]:
        return np.full(len(first), np.inf)
    ranges = windows.over(first, end)
    assert ranges is not None
    drawn = order.drawn(sample)[number]
    wait = next_uses(
        *ranges, drawn, windows.count, lambda epoch: Permutation(windows.count, order.key(number, epoch))
    )
    return wait * sum(weights) / weights[number]


def next_uses(
    first: np.ndarray, end: np.ndarray, drawn: int, windows: int, permutation: Callable[[int], Permutation]
) -> np.ndarray:
    """Return the number of samples of the source until the next read of each range of windows [first, end).

    first, end: non-empty ranges of about equal length, int64 `[n]`. drawn: number of samples of the source read so far.
    permutation: maps an epoch number to the permutation of `windows` windows.
    """
    epoch, now = divmod(drawn, windows)
    width = int((end - first).max())
    # Shorter ranges repeat their last window up to the length of the longest range.
    members = np.minimum(first[:, None] + np.arange(width), end[:, None] - 1)
    places = permutation(epoch).inverse(members.ravel()).reshape(members.shape)
    ahead = np.where(places >= now, places - now, np.iinfo(np.int64).max).min(axis=1)
    gone = np.flatnonzero(ahead == np.iinfo(np.int64).max)
    if len(gone):
        places = permutation(epoch + 1).inverse(members[gone].ravel()).reshape(len(gone), width)
        ahead[gone] = places.min(axis=1) + windows - now
    return ahead.astype(np.float64)
