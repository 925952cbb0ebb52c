"""`ParallelModel`, the training loop's interface to a model on any layout, and its implementation without a pipeline.

`ParallelModel` calls every data-parallel engine in the same way and order, by the interface `DataParallel`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from forge.batch import Batch
from forge.model import IGNORE, Transformer
from forge.parallel.context import SequenceSplit
from forge.parallel.layout import Layout
from forge.parallel.logits import LargestLogits
from forge.parallel.step.gradients import sum_gradients
from forge.parallel.step.routers import RouterReport, Routers
from forge.parallel.tensor.apply import partial_shards
from forge.shard import Shard


class LossObserver(Protocol):
    """Receives the loss of every token (`FusedLoss.observer`)."""

    def begin(self, inputs: Batch) -> None: ...
    def count(self, losses: Tensor) -> None: ...


@dataclass(frozen=True)
class Sums:
    """Sums over all valid tokens of the global batch.

    values: float64 device vector, equal on all ranks: objective, cross-entropy, z-loss, number of tokens.
    """

    values: Tensor

    @property
    def objective(self) -> Tensor:
        return self.values[0]

    @property
    def cross_entropy(self) -> Tensor:
        return self.values[1]

    @property
    def tokens(self) -> Tensor:
        return self.values[3]


class DataParallel(Protocol):
    """An engine on one model, or on one stage of a model. Every method is collective unless its docstring says otherwise."""

    name: str
    """The engine's name in the log."""
    shards: list[Shard]
    """This rank's shards of the parameters, for the optimizer, in the order of `named_parameters`; available after
    `allocate`.
    """

    copies: dict[Tensor, Tensor]
    """Compute-dtype copies of master parameters: `Shard.parameter` -> the same elements in the model's compute weights.

    Available after `allocate`; empty for an engine without copies.
    """

    def allocate(self, device: torch.device) -> None:
        """Give this rank uninitialised storage for its part of the model."""

    def begin_microbatch(self, *, last: bool) -> None:
        """Prepare for a backward. Call before each forward that has a backward; in a pipeline, just before the backward.

        last: True for the last backward of the optimizer step.
        """

    def take_weight_gradients(self, *, last: bool) -> None:
        """Take over weight gradients that a pipeline schedule computed separately from input gradients.

        Call after each such computation. last: True for the last one of the optimizer step.
        """

    def start_gradient_sync(self) -> None:
        """Launch the remaining reductions over data ranks. Call after the last backward."""

    def finish_gradient_sync(self) -> None:
        """Complete the reductions. Afterwards the gradients of `shards` are sums over data ranks."""

    def after_update(self, copied: Collection[Tensor] = ()) -> None:
        """Make the model use the new values of `shards`. Call after each write to `shards`.

        copied: parameters of `shards` whose compute weights (`copies`) the caller has already written.
        """

    def zero_gradients(self) -> None:
        """Discard the gradients."""

    def replicated_tensors(self) -> Iterable[tuple[str, Tensor, dist.ProcessGroup]]:
        """Return tensors besides `shards` that must be bit-identical across a group, each as (name, tensor, group)."""

    def memory(self) -> dict[str, int]:
        """Return the bytes of device memory held by the engine on this rank, by kind. Not collective."""

    def accumulation_memory_summary(self) -> str:
        """Return a sentence for the log about the gradient memory held between microbatches. Not collective."""


class ParallelModel:
    """A model distributed over ranks.

    Methods are collective unless their docstring says otherwise. The training loop calls them in the order of this
    file.

    parts: this rank's pipeline stages; without a pipeline, the whole model as the only part. shards: this rank's shards
    of the parameters. buffers: the balancing state of routers, saved in checkpoints with the parameters. copies:
    `Shard.parameter` -> its elements in the model's compute weights; empty if the engine has no separate compute weights.
    """

    def __init__(self, parts: Sequence[Transformer], engines: Sequence[DataParallel], layout: Layout):
        self.parts = list(parts)
        self.shards = [shard for engine in engines for shard in engine.shards]
        self.copies = {parameter: copy for engine in engines for parameter, copy in engine.copies.items()}
        self._engines = engines
        self._routers = None if layout.model.moe is None else Routers(parts, layout)
        self.buffers = [] if self._routers is None else self._routers.shards()
        self._partial: list[Shard] = []
        if layout.meshes.tp.size() > 1:
            pairs = zip(parts, engines, strict=True)
            self._partial = [shard for part, engine in pairs for shard in partial_shards(part, engine.shards)]
        self._largest_logits = LargestLogits(parts, self.shards, layout) if layout.observe_logits else None
        self.largest_logits = {} if self._largest_logits is None else self._largest_logits.by_parameter
        self._meshes = layout.meshes
        self._split = SequenceSplit(layout.meshes.cp, layout.sequence_pieces, layout.model.mtp_depth)
        self._loss_observer: LossObserver | None = None
        self.micro_batch_size = layout.micro_batch_size

    def observe_losses(self, observer: LossObserver | None) -> None:
        """Call `observer` with the loss of every token, beginning with the next forward. Not collective.

        observer: None: stop the calls.
        """
        self._loss_observer = observer
        part: Any
        for part in self.parts:
            part.loss.observer = None if observer is None else observer.count

    def begin_losses(self, inputs: Batch) -> None:
        """Announce to the loss observer that the next losses belong to `inputs`.

        Call before each forward. Not collective.
        """
        if self._loss_observer is not None:
            self._loss_observer.begin(inputs)

    def count_tokens(self, batch: Batch) -> Tensor:
        """Return the number of valid labels in the global batch: a float64 device scalar, equal on all ranks.

        Collective. Call before the first forward, because the loss is divided by this number before backward.
        """
        return _sum_over(_valid_tokens(self._split.part(batch.labels)), self._meshes.loss)

    def forward_backward(self, batch: Batch, tokens: Tensor) -> Sums:
        """Accumulate the gradient of (sum of losses / tokens) over all microbatches. Collective.

        tokens: from `count_tokens`. Return the sums of losses over the global batch.
        """
        microbatches = [self._split.local_part(micro) for micro in batch.microbatches(self.micro_batch_size)]
        # A batch without valid tokens has loss 0 and gradient 0, not 0/0.
        divisor = tokens.clamp(min=1)
        for part in self.parts:
            part.set_loss_scale(1 / divisor)
        losses = self._forward_backward(microbatches, divisor)
        # Start the sync before any other collective, so all ranks issue collectives in the same order. Other ranks may
        # have launched a reduction during backward that this rank launches only here, because its backward computed no
        # gradient.
        for engine in self._engines:
            engine.start_gradient_sync()
        return Sums(torch.cat([_sum_over(losses, self._meshes.pipeline), tokens.reshape(1)]))

    def finalize_gradients(self) -> None:
        """Complete the sums of gradients over all mesh axes. Collective.

        The shards then hold the gradient of the global batch.
        """
        for engine in self._engines:
            engine.finish_gradient_sync()
        if self._partial:
            sum_gradients(self._partial, self._meshes.tp.get_group())
        if self._largest_logits is not None:
            self._largest_logits.complete()

    def update_router(self, skip: Tensor) -> RouterReport | None:
        """Update the balancing state of all routers, unless `skip` (device scalar) is 1.0.

        Return the report, or None for a dense model.
        """
        return None if self._routers is None else self._routers.update(skip)

    def after_update(self, copied: Collection[Tensor] = ()) -> None:
        """Recompute tensors derived from the parameters.

        Call after each optimizer step, and after loading into a model in use. copied: parameters of `shards`
        whose compute weights (`copies`) are already up to date.
        """
        for engine in self._engines:
            engine.after_update(copied)

    def zero_gradients(self) -> None:
        """Discard the gradients and the largest logits."""
        for engine in self._engines:
            engine.zero_gradients()
        if self._largest_logits is not None:
            self._largest_logits.reset()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Sums:
        """Return the sums of losses of `batch`, without gradients. Collective."""
        inputs = self._split.local_part(batch)
        values = torch.zeros(4, dtype=torch.float64, device=inputs.tokens.device)
        losses = self._forward(inputs)
        if losses is not None:
            values[:3] = losses
            values[3] = _valid_tokens(inputs.labels)
        return Sums(_sum_over(values, self._meshes.pipeline))

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return next-token logits `[batch, seq, vocab]` of `tokens` `[batch, seq]`.

        Collective. All ranks pass the same tokens.
        """
        return self._split.logits(self._logits, tokens)

    def replicated_tensors(self) -> Iterator[tuple[str, Tensor, dist.ProcessGroup]]:
        """Yield tensors besides `shards` that must be bit-identical across a group, each as (name, tensor, group)."""
        for engine in self._engines:
            yield from engine.replicated_tensors()

    def discard_fingerprints(self) -> None:
        """Forget the fingerprints of the steps so far. Call after a roll-back, which abandons these steps."""
        for _ in self.replicated_tensors():
            pass

    def memory(self) -> dict[str, int]:
        """Return the bytes of device memory held by the engines on this rank, by kind. Not collective."""
        of_engines = [engine.memory() for engine in self._engines]
        return {kind: sum(memory[kind] for memory in of_engines) for kind in of_engines[0]}

    @property
    def engine_name(self) -> str:
        """Return the name of this rank's data-parallel engine, for the log."""
        return self._engines[0].name

    def accumulation_memory_summary(self) -> str:
        """Return a sentence for the log about the gradient memory held between microbatches. Not collective."""
        return "; ".join(engine.accumulation_memory_summary() for engine in self._engines)

    def _forward_backward(self, microbatches: list[Batch], divisor: Tensor) -> Tensor:
        """Compute the gradient of (sum of all losses) / divisor. Return the sums of losses on this rank, float64 `[3]`."""
        raise NotImplementedError

    def _forward(self, inputs: Batch) -> Tensor | None:
        """Run the whole model's forward. Return its result; None if the last layer is on another rank."""
        raise NotImplementedError

    def _logits(self, inputs: Batch) -> Tensor:
        """Run the whole model's forward for inputs without labels. Return the logits on every rank."""
        raise NotImplementedError


class SequentialModel(ParallelModel):
    """The model without a pipeline: every rank has its shards of all layers."""

    def _forward_backward(self, microbatches: list[Batch], divisor: Tensor) -> Tensor:
        (engine,), total = self._engines, torch.zeros(3, dtype=torch.float64, device=divisor.device)
        for index, inputs in enumerate(microbatches):
            engine.begin_microbatch(last=index == len(microbatches) - 1)
            losses = self._forward(inputs)
            (losses[0] / divisor.to(losses.dtype)).backward()
            total += losses.detach()
        return total

    def _forward(self, inputs: Batch) -> Tensor:
        self.begin_losses(inputs)
        return self.parts[0](*inputs.arguments)

    _logits = _forward


def _valid_tokens(labels: Tensor) -> Tensor:
    return (labels != IGNORE).sum(dtype=torch.float64)


def _sum_over(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values
