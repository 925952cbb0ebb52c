"""Show which samples a step reads, decoded, to check the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forge.data.dataset import PackedDataset, read_window
from forge.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sample:
    """One sequence of a step.

    `sample` is its global number and `rank` the data rank that reads it; it is window `window` (from token `first_token`)
    of `source`, in that source's epoch `epoch`, from 0. `tokens` are its first ids and `text` their text (None without
    a tokenizer). `documents`: the positions in the sequence at which a document begins. `masked`: the number of labels
    that are ignored because they begin a document and `data.document_mask` is on.
    """

    sample: int
    rank: int
    source: str
    epoch: int
    window: int
    first_token: int
    tokens: list[int]
    text: str | None
    documents: list[int]
    masked: int


def samples_of_step(
    dataset: PackedDataset,
    tokenizer: Tokenizer | None,
    step: int,
    *,
    global_batch_size: int,
    rank: int | None = None,
    ranks: int = 1,
    head: int = 16,
    excerpt: int = 64,
) -> Iterator[Sample]:
    """Yield the sequences of step `step` (from 1) in order: all of them, or those of data rank `rank` of `ranks`.

    Assumes that all steps had `global_batch_size` sequences. Of each sequence the first `head` ids are shown, and the
    text of the first `excerpt`. Raises UserError where the dataset's order has a source that the dataset has not.
    """
    rows, seq_len = global_batch_size // ranks, dataset.seq_len
    before, readers = (step - 1) * global_batch_size, range(ranks) if rank is None else (rank,)
    for reader in readers:
        for place in range(before + reader * rows, before + (reader + 1) * rows):
            sample = dataset.order.nth(0, place)
            name, epoch, window = dataset.locate(sample)
            source = dataset.sources[name]
            tokens, owners = read_window(source, window, seq_len, documents=True)
            assert owners is not None
            within = [int(start) for start in np.flatnonzero(np.diff(owners)) + 1]
            first = window * seq_len
            begins_document = first == 0 or bool(source.document_ids(first - 1, 2)[1])
            starts = [0, *within] if begins_document else within
            yield Sample(
                sample=sample,
                rank=reader,
                source=source.name,
                epoch=epoch,
                window=window,
                first_token=first,
                tokens=tokens[:head].tolist(),
                text=tokenizer.decode(tokens[:excerpt].tolist()) if tokenizer else None,
                documents=[start for start in starts if start < seq_len],
                masked=len(within) if dataset.document_mask else 0,
            )
