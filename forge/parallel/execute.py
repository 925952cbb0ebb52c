"""`ParallelModel`: what the training loop sees of a model on any layout, and the implementation without a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from forge.model import IGNORE, Transformer
from forge.parallel.context import SequenceSplit
from forge.parallel.context.sequence import Sequences
from forge.parallel.data import DataParallel
from forge.parallel.mesh import Meshes
from forge.parallel.routers import RouterReport, Routers
from forge.parallel.tensor import open_shards, sum_open_gradients
from forge.shard import Shard


class Batch(Sequences, Protocol):
    """What this data rank reads for one optimizer step."""

    def microbatches(self, size: int) -> Any: ...


@dataclass(frozen=True)
class Sums:
    """Sums over all valid tokens of the global batch; `values` is one float64 device vector, equal on all ranks."""

    values: Tensor

    NAMES = ("objective", "cross_entropy", "z_loss", "tokens")

    @property
    def objective(self) -> Tensor:
        return self.values[0]

    @property
    def cross_entropy(self) -> Tensor:
        return self.values[1]

    @property
    def tokens(self) -> Tensor:
        return self.values[3]


class ParallelModel(Protocol):
    """A model spread over ranks. Every method is collective; the loop calls them in the order given here."""

    parts: list[Transformer]
    shards: list[Shard]
    """The parameters."""
    buffers: list[Shard]
    """What else belongs into checkpoints: the balancing state of routers."""

    def count_tokens(self, batch: Batch) -> Tensor:
        """Number of valid labels in the global batch: a float64 device scalar, equal on all ranks."""

    def forward_backward(self, batch: Batch, tokens: Tensor) -> Sums:
        """Add the gradient of (sum of losses / tokens) of every microbatch to the shards; their sums over all ranks."""

    def finalize_gradients(self) -> None:
        """Complete the sums of gradients across every axis that backward left open."""

    def update_router(self, skip: Tensor) -> RouterReport | None:
        """Move the balancing state of all routers, unless the step is skipped (device scalar 1.0); None if there is none."""

    def after_update(self) -> None:
        """Make anew what derives from the parameters: after each optimizer step or load into a used model."""

    def zero_gradients(self) -> None:
        """Forget the gradients."""

    def evaluate(self, batch: Batch) -> Sums:
        """The sums of one batch without a gradient."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token scores `[batch, seq, vocab]` of `tokens` `[batch, seq]`, the same tokens on all ranks."""

    def memory(self) -> dict[str, int]:
        """What this rank's device holds through a step, in bytes by kind. Not collective."""

    def held_while_accumulating(self) -> str:
        """What lies in memory between the microbatches of a step, for the log. Not collective."""


class SequentialModel:
    """The whole model in every rank's hands, layer after layer."""

    def __init__(
        self,
        model: Transformer,
        engine: DataParallel,
        meshes: Meshes,
        split: SequenceSplit,
        micro_batch_size: int,
    ):
        self.parts = [model]
        self.shards = engine.shards
        self._routers = Routers(model.routers, meshes)
        self.buffers = self._routers.shards()
        self._model = model
        self._engine = engine
        self._group = meshes.loss
        self._tp = meshes.tp
        self._open = open_shards(model, engine.shards)
        self._split = split
        self._micro_batch_size = micro_batch_size

    def count_tokens(self, batch: Batch) -> Tensor:
        labels = self._split.local_part(batch).labels
        return self._over_ranks((labels != IGNORE).sum(dtype=torch.float64))

    def forward_backward(self, batch: Batch, tokens: Tensor) -> Sums:
        microbatches = list(batch.microbatches(self._micro_batch_size))
        total = torch.zeros(3, dtype=torch.float64, device=batch.tokens.device)
        # A batch without any valid token has loss 0 and gradient 0, not 0/0.
        divisor = tokens.clamp(min=1)
        self._model.set_loss_scale(1 / divisor)
        for index, micro in enumerate(microbatches):
            self._engine.begin_microbatch(last=index == len(microbatches) - 1)
            losses = self._model(*self._split.local_part(micro))
            (losses[0] / divisor.to(losses.dtype)).backward()
            total += losses.detach()
        # Before any other collective: a rank may have had nothing to say of some parameters until now.
        self._engine.start_gradient_sync()
        return Sums(torch.cat([self._over_ranks(total), tokens.reshape(1)]))

    def finalize_gradients(self) -> None:
        self._engine.finish_gradient_sync()
        # Tensor parallelism leaves some sums open.
        sum_open_gradients(self._open, self._tp)

    def update_router(self, skip: Tensor) -> RouterReport | None:
        return self._routers.update(skip)

    def after_update(self) -> None:
        self._engine.after_update()

    def zero_gradients(self) -> None:
        self._engine.zero_gradients()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Sums:
        inputs = self._split.local_part(batch)
        losses = self._model(*inputs)
        valid = (inputs.labels != IGNORE).sum(dtype=torch.float64)
        return Sums(self._over_ranks(torch.cat([losses.double(), valid.reshape(1)])))

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        return self._split.logits(self._model, tokens)

    def copies(self) -> Iterable[tuple[str, Tensor, dist.ProcessGroup]]:
        """Weights that an engine computes with and that are not its shards: name, values, the ranks that hold them."""
        return getattr(self._engine, "copies", tuple)()

    def memory(self) -> dict[str, int]:
        return self._engine.memory()

    def held_while_accumulating(self) -> str:
        return self._engine.held_while_accumulating()

    def _over_ranks(self, values: Tensor) -> Tensor:
        if self._group.size() > 1:
            dist.all_reduce(values, group=self._group)
        return values
