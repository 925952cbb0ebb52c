"""Batches of held-out sources: the same windows in every evaluation and layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from forge.batch import Batch
from forge.data.dataset import read_window
from forge.data.loader import stack_windows
from forge.data.read_ahead import in_order
from forge.data.sources import Source, count_windows, held_out_windows, is_remote


def evaluation_batches(
    source: Source,
    *,
    seq_len: int,
    sequences: int,
    micro_batch_size: int,
    rank: int,
    ranks: int,
    device: torch.device | str = "cpu",
    document_mask: bool = False,
    unreadable: list[Exception] | None = None,
) -> Iterator[Batch]:
    """Yield `sequences` windows of the source (see `held_out_windows`), distributed over the data ranks.

    Every rank yields the same number of batches of `micro_batch_size` rows, padded with rows of only IGNORE labels. The
    windows do not depend on `ranks`. unreadable: a list that collects read errors; None: read errors are raised. After a
    collected error, the batch is all padding, so all ranks still make the same collective calls.
    """

    def read(window: int) -> tuple[np.ndarray, np.ndarray | None]:
        return read_window(source, window, seq_len, document_mask)

    windows = held_out_windows(count_windows(source, seq_len), sequences)
    per_round = micro_batch_size * ranks
    for first in range(rank * micro_batch_size, -(-len(windows) // per_round) * per_round, per_round):
        here = windows[first : first + micro_batch_size]
        rows: Iterable[tuple[np.ndarray, np.ndarray | None]] = map(read, here)
        if unreadable:
            rows = ()  # after one failed read, do not wait for the store's retries again
        elif is_remote(source):
            rows = in_order(read, here, micro_batch_size)
        try:
            batch = stack_windows(rows, micro_batch_size, seq_len, document_mask, first)
        except Exception as error:
            if unreadable is None:
                raise
            unreadable.append(error)
            batch = stack_windows((), micro_batch_size, seq_len, document_mask, first)
        yield batch.to(torch.device(device))
