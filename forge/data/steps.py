"""The samples of each data rank in each step, under changing step sizes and mixtures.

A step of B sequences of S tokens reads the next B S / L samples, i.e. windows of L = train.seq_len tokens. Each window
is cut into L / S rows of the batch. An epoch therefore reads every token once, for any step sizes. The samples of a
step depend only on the numbers of earlier samples and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from forge.config import StepPlan
from forge.data.dataset import PackedDataset

Row = tuple[np.ndarray, np.ndarray | None]


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
