"""The hook of `metrics.sources`: reports loss by data source and by position in the sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.batch import Batch
from forge.data.order import numbered
from forge.hook import Hook, StepResult
from forge.model import IGNORE
from forge.train.results import DelayedRead
from forge.train.trainer import Trainer

# Number of intervals of the sequence; each has a mean loss.
PARTS = 16


class LossCounter:
    """Sums of losses and numbers of valid tokens, by data source and by interval of the sequence.

    sums: (loss, tokens) of each source, then of each interval, float64 `[n_sources + PARTS, 2]`. ahead: summed losses
    of all multi-token prediction modules by source, float64 `[n_sources]`.
    """

    def __init__(self, n_sources: int, seq_len: int, device: torch.device):
        self._n_sources, self._seq_len = n_sources, seq_len
        self.sums = torch.zeros(n_sources + PARTS, 2, dtype=torch.float64, device=device)
        self.ahead = torch.zeros(n_sources, dtype=torch.float64, device=device)
        self._inputs: Batch | None = None
        self._done = 0

    def begin(self, inputs: Batch) -> None:
        """Announce that the next losses passed to `count` belong to `inputs`. Call before each forward."""
        self._inputs, self._done = inputs, 0

    def count(self, losses: Tensor) -> None:
        """Add the losses `[n]` of the next n tokens of the forward, in row-major order of `[batch, seq]`.

        The losses of the main prediction come first. The losses of each multi-token prediction module follow, for all
        tokens again.
        """
        inputs, first = self._inputs, self._done
        assert inputs is not None and inputs.sources is not None
        rows, seq = inputs.labels.shape
        self._done += len(losses)
        module, first = divmod(first, rows * seq)
        places = torch.arange(first, first + len(losses), device=losses.device)
        sources = inputs.sources[places // seq]
        if module:
            self.ahead.index_add_(0, sources, losses.double())
            return
        labels, positions = inputs.labels.flatten()[places], places % seq
        if inputs.positions is not None:
            positions = inputs.positions.flatten()[places]
        pairs = torch.stack([losses.double(), (labels != IGNORE).double()], dim=-1)  # [n, 2]
        self.sums.index_add_(0, sources, pairs)
        self.sums.index_add_(0, self._n_sources + positions * PARTS // self._seq_len, pairs)


class SourceLosses(Hook):
    """Adds `sources`, `positions` and, with multi-token prediction, `mtp_sources` to the training lines of the metrics.

    All are mean losses over the valid tokens of the step. `after_gradients` is collective.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._names = numbered(trainer.data.dataset.labels.values())
        self._counter = LossCounter(len(self._names), trainer.config.train.seq_len, trainer.device)
        self._delayed = DelayedRead(trainer.device)
        self._watching = False

    def before_gradients(self, step: int) -> None:
        self._unwatch()
        if self._trainer.metrics.is_due(step):
            self._counter.sums.zero_()
            self._counter.ahead.zero_()
            self._watch()

    def after_gradients(self, step: int) -> None:
        if self._watching:
            self._unwatch()
            sums = torch.cat([self._counter.sums.flatten(), self._counter.ahead])
            # Tensor-parallel ranks have equal sums; the sums of this group's ranks add up to the global batch.
            dist.all_reduce(sums, group=self._trainer.meshes.pipeline)
            self._delayed.push(step, sums)

    def after_result(self, result: StepResult) -> None:
        if result.skipped:
            # A diagnosis may recompute the skipped step and then the current step. Stop counting the current step,
            # because its sums would include both.
            self._unwatch()
        ready = self._delayed.pop(flush=True) if self._trainer.metrics.is_due(result.step) else None
        if ready is not None:
            self._trainer.metrics.publish(ready[0], self._means(ready[1]))

    def after_rollback(self, step: int) -> None:
        self._unwatch()
        self._delayed = DelayedRead(self._trainer.device)

    def after_run(self) -> None:
        self._unwatch()

    def _means(self, values: list[float]) -> dict[str, Any]:
        """Return mean losses by source and by interval of the sequence.

        A source without valid tokens in the step is omitted. An interval without valid tokens is None.
        """
        number = len(self._names)
        values, ahead = values[:-number], values[-number:]
        pairs = list(zip(values[::2], values[1::2], strict=True))
        of_sources = list(zip(self._names, pairs[:number], ahead, strict=True))
        found: dict[str, Any] = {
            "sources": {name: loss / tokens for name, (loss, tokens), _ in of_sources if tokens},
            "positions": [loss / tokens if tokens else None for loss, tokens in pairs[number:]],
        }
        if depth := self._trainer.config.model.mtp_depth:
            # As for mtp_loss, the divisor is the number of valid tokens of the main prediction, times the number of modules.
            found["mtp_sources"] = {
                name: of / tokens / depth for name, (_, tokens), of in of_sources if tokens
            }
        return found

    def _watch(self) -> None:
        self._watching = True
        self._trainer.model.observe_losses(self._counter)

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._trainer.model.observe_losses(None)
