"""The hook that counts the loss of each source of the mixture, and by position in the sequence: `metrics.sources`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.data.order import numbered
from forge.hook import Hook, StepResult
from forge.model import IGNORE
from forge.parallel.context import ModelInputs
from forge.train.results import DelayedRead
from forge.train.trainer import Trainer

# Parts of the sequence whose mean losses are reported.
PARTS = 16


class LossCounter:
    """Sums of losses and numbers of valid tokens, for each of `n_sources` and for each of PARTS parts of the sequence."""

    def __init__(self, n_sources: int, seq_len: int, device: torch.device):
        self._n_sources, self._seq_len = n_sources, seq_len
        self.sums = torch.zeros(n_sources + PARTS, 2, dtype=torch.float64, device=device)
        self._inputs: ModelInputs | None = None

    def watch(self, inputs: ModelInputs) -> None:
        """Call before each forward: the next losses are of these tokens."""
        self._inputs = inputs

    def count(self, losses: Tensor) -> None:
        """Add the losses of the tokens of the forward under way: `[batch * seq]`.

        Only the first call of a forward counts: multi-token prediction calls the loss again, for tokens further ahead.
        """
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            return
        assert inputs.labels is not None and inputs.sources is not None
        valid = inputs.labels != IGNORE
        pairs = torch.stack([losses.view(valid.shape).double(), valid.double()], dim=-1)  # [batch, seq, 2]
        self.sums.index_add_(0, inputs.sources, pairs.sum(1))
        positions = inputs.positions
        if positions is None:
            positions = torch.arange(valid.shape[1], device=valid.device).expand_as(valid)
        part = self._n_sources + positions * PARTS // self._seq_len
        self.sums.index_add_(0, part.flatten(), pairs.flatten(0, 1))


class SourceLosses(Hook):
    """Adds `sources` and `positions` to the training lines of the metrics: means over the valid tokens of that step."""

    def __init__(self, trainer: Trainer):
        self._trainer, self._sources = trainer, trainer.data.dataset.sources
        self._names = numbered(source.name for source in self._sources.values())
        self._counter = LossCounter(len(self._names), trainer.config.train.seq_len, trainer.device)
        self._delayed = DelayedRead(trainer.device)
        self._watching = False
        self._fields: dict[str, Any] = {}
        trainer.metrics.more_fields = self._take

    def before_gradients(self, step: int) -> None:
        self._unwatch()
        if self._trainer.metrics.is_due(step):
            self._counter.sums.zero_()
            self._watch()

    def after_gradients(self, step: int) -> None:
        if self._watching:
            self._unwatch()
            sums = self._counter.sums.clone()
            # Ranks of tensor parallelism have the same sums; these are the ranks whose losses add up.
            dist.all_reduce(sums, group=self._trainer.meshes.pipeline)
            self._delayed.push(step, sums.flatten())

    def after_result(self, result: StepResult) -> None:
        """Read what belongs to the result; it is asked for when the line is written, by the hook that follows."""
        if result.skipped:
            # That step may be computed again, within the one under way, whose losses are then not known.
            self._unwatch()
        ready = self._delayed.pop(flush=True) if self._trainer.metrics.is_due(result.step) else None
        self._fields = {} if ready is None else {"step": ready[0], **self._means(ready[1])}

    def after_rollback(self, step: int) -> None:
        self._unwatch()
        self._delayed = DelayedRead(self._trainer.device)

    def after_run(self) -> None:
        self._unwatch()

    def _take(self, step: int) -> dict[str, Any]:
        fields = dict(self._fields)
        return fields if fields.pop("step", None) == step else {}

    def _means(self, values: list[float]) -> dict[str, Any]:
        """A source that has no valid token in the step is left out; a part of the sequence without one is null."""
        pairs = list(zip(values[::2], values[1::2], strict=True))
        of_sources = zip(self._names, pairs, strict=False)
        return {
            "sources": {name: loss / tokens for name, (loss, tokens) in of_sources if tokens},
            "positions": [loss / tokens if tokens else None for loss, tokens in pairs[len(self._names) :]],
        }

    def _watch(self) -> None:
        model: Any = self._trainer.model
        self._watching, model.watch = True, self._counter.watch
        for part in model.parts:
            part.loss.report = self._counter.count

    def _unwatch(self) -> None:
        if self._watching:
            model: Any = self._trainer.model
            self._watching, model.watch = False, lambda inputs: None
            for part in model.parts:
                part.loss.report = None
