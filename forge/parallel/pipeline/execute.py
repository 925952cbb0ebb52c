"""`PipelinedModel`: the `ParallelModel` of which each rank holds some layers.

One optimizer step is one run of the schedule. The loss is divided by the step's valid tokens before backward, as without
a pipeline, and nothing scales gradients afterwards. Sizes of what stages hand on are known beforehand, so no message and
no forward is spent on finding them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from forge.config import Config
from forge.model import IGNORE, Transformer
from forge.model.precision import promoted
from forge.parallel.context import SequenceSplit
from forge.parallel.context.sequence import Inputs
from forge.parallel.data import DataParallel
from forge.parallel.execute import Batch, Sums
from forge.parallel.mesh import Meshes
from forge.parallel.pipeline.halves import HalfDone, backward_to_input
from forge.parallel.pipeline.plan import PipelinePlan
from forge.parallel.pipeline.routers import StageRouters
from forge.parallel.pipeline.schedule import Action
from forge.parallel.pipeline.stages import Stage
from forge.parallel.pipeline.tied import NAME, Tied, without_copy
from forge.parallel.pipeline.wire import Key, Wire
from forge.parallel.precision import DTYPES
from forge.parallel.routers import RouterReport
from forge.parallel.tensor import open_shards, sum_open_gradients


@dataclass(frozen=True)
class Part:
    """A stage of this rank: its module, with the engine that shares it among the ranks which read other data."""

    stage: Stage
    model: Transformer
    engine: DataParallel


class PipelinedModel:
    """The stages of this rank, and what it takes for them to be one model with those of the others."""

    def __init__(
        self, parts: Sequence[Part], plan: PipelinePlan, config: Config, meshes: Meshes, split: SequenceSplit
    ):
        self.parts = [part.model for part in parts]
        self._parts = {part.stage.index: part for part in parts}
        self._plan, self._schedule = plan, plan.schedule
        self._program = plan.schedule.programs[meshes.pp.rank()]
        self._last_backward = plan.schedule.last_backward(meshes.pp.rank())
        self._pp, self._loss, self._everyone, self._tp = meshes.pp, meshes.loss, meshes.pipeline, meshes.tp
        self._split = split
        self._micro_batch_size = config.train.micro_batch_size
        self._compute = DTYPES[config.precision.compute]
        self._dim, self._vocab = config.model.dim, config.model.vocab_size
        self._pieces = meshes.tp.size() if config.parallel.sequence_parallel else 1
        tied = config.model.tie_embeddings
        own = [
            without_copy(part.engine.shards, is_first=part.stage.embed) if tied else part.engine.shards
            for part in parts
        ]
        self.shards = [shard for shards in own for shard in shards]
        self._tied = _tied(parts, plan, meshes) if tied else None
        self._open = [shard for part in parts for shard in open_shards(part.model, part.engine.shards)]
        self._routers = StageRouters(self.parts, config, meshes)
        self.buffers = self._routers.shards()

    def count_tokens(self, batch: Batch) -> Tensor:
        labels = self._split.local_part(batch).labels
        return _sum_over((labels != IGNORE).sum(dtype=torch.float64), self._loss)

    def forward_backward(self, batch: Batch, tokens: Tensor) -> Sums:
        microbatches = [self._split.local_part(micro) for micro in batch.microbatches(self._micro_batch_size)]
        # A batch without any valid token has loss 0 and gradient 0, not 0/0.
        divisor = tokens.clamp(min=1)
        for model in self.parts:
            model.set_loss_scale(1 / divisor)
        step = _Step(self, microbatches, divisor)
        for action in self._program:
            step.do(action)
        step.wire.close()
        for part in self._parts.values():
            part.engine.start_gradient_sync()
        return Sums(torch.cat([_sum_over(step.total, self._everyone), tokens.reshape(1)]))

    def finalize_gradients(self) -> None:
        for part in self._parts.values():
            part.engine.finish_gradient_sync()
        if self._tied is not None:
            self._tied.sum_gradients()
        # Tensor parallelism leaves some sums open.
        sum_open_gradients(self._open, self._tp)

    def update_router(self, skip: Tensor) -> RouterReport | None:
        return self._routers.update(skip)

    def after_update(self) -> None:
        if self._tied is not None:
            self._tied.copy_values()
        for part in self._parts.values():
            part.engine.after_update()

    def zero_gradients(self) -> None:
        for part in self._parts.values():
            part.engine.zero_gradients()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Sums:
        inputs = self._split.local_part(batch)
        values = torch.zeros(4, dtype=torch.float64, device=inputs.tokens.device)
        losses = self._forward(inputs)
        if losses is not None:
            values[:3] = losses
            values[3] = (inputs.labels != IGNORE).sum()
        return Sums(_sum_over(values, self._everyone))

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        return self._split.logits(self._logits, tokens)

    def memory(self) -> dict[str, int]:
        of_parts = [part.engine.memory() for part in self._parts.values()]
        return {kind: sum(of_part[kind] for of_part in of_parts) for kind in of_parts[0]}

    def copies(self) -> Iterator[tuple[str, Tensor, dist.ProcessGroup]]:
        """As the sequential model's, of all stages of this rank."""
        for part in self._parts.values():
            yield from getattr(part.engine, "copies", tuple)()

    def held_while_accumulating(self) -> str:
        return "; ".join(
            f"stage {index}: {part.engine.held_while_accumulating()}" for index, part in self._parts.items()
        )

    def _logits(self, tokens: Tensor, labels: None = None, positions: Tensor | None = None) -> Tensor:
        """As the whole model's forward without labels: the last stage's scores, on every stage's ranks."""
        scores = self._forward(Inputs(tokens, labels, positions, None))  # type: ignore[arg-type]
        if scores is None:
            shape = (*tokens.shape, self._vocab)
            scores = torch.empty(shape, dtype=promoted(self._compute), device=tokens.device)
        scores = scores.contiguous()
        dist.broadcast(scores, group=self._pp, group_src=self._plan.ends[1])
        return scores

    def _forward(self, inputs: Inputs) -> Tensor | None:
        """One microbatch through all stages; what the last one returns, None where that is not here."""
        wire = self.new_wire(inputs)
        output = None
        for index, part in self._parts.items():
            elsewhere = index > 0 and index - 1 not in self._parts
            if elsewhere:
                wire.receive(Key("F", index, 0), self.handed_on(inputs), self._compute)
            x = wire.take(Key("F", index, 0)) if index else inputs.tokens
            output = self.run_forward(part, x, inputs)
            if not part.stage.head:
                wire.put(Key("F", index + 1, 0), output)
                if index + 1 not in self._parts:
                    wire.send(Key("F", index + 1, 0))
                output = None
        wire.close()
        return output

    def part(self, stage: int) -> Part:
        return self._parts[stage]

    def new_wire(self, inputs: Inputs) -> Wire:
        return Wire(self._pp, self._schedule.rank_of, inputs.tokens.device)

    def is_last_backward(self, action: Action) -> bool:
        return action in self._last_backward

    def handed_on(self, inputs: Inputs) -> tuple[int, int, int]:
        """Shape of what stages hand on for `inputs`: `[batch, this rank's piece of the sequence, dim]`."""
        rows, seq = inputs.tokens.shape
        return rows, seq // self._pieces, self._dim

    @property
    def compute(self) -> torch.dtype:
        """Of what stages hand on."""
        return self._compute

    def run_forward(self, part: Part, x: Tensor, inputs: Inputs) -> Tensor:
        positions = inputs.positions
        if positions is None and x.shape[1] != inputs.tokens.shape[1]:
            # From a piece of the sequence a stage cannot see how long the whole is.
            rows, seq = inputs.tokens.shape
            positions = torch.arange(seq, device=x.device).expand(rows, seq)
        return part.model(x, inputs.labels, positions, inputs.documents)


class _Step:
    """One run of the schedule on this rank, action by action."""

    def __init__(self, owner: PipelinedModel, microbatches: list[Inputs], divisor: Tensor):
        self._owner, self._microbatches, self._divisor = owner, microbatches, divisor
        self.wire = owner.new_wire(microbatches[0])
        self.total = torch.zeros(3, dtype=torch.float64, device=divisor.device)
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._halves: dict[tuple[int, int], HalfDone] = {}

    def do(self, action: Action) -> None:
        stage, kind, microbatch = action
        if kind.startswith("SEND"):
            self.wire.send(Key(kind[-1], stage + 1 if kind[-1] == "F" else stage - 1, microbatch))
        elif kind.startswith("RECV"):
            shape = self._owner.handed_on(self._microbatches[microbatch])
            self.wire.receive(Key(kind[-1], stage, microbatch), shape, self._owner.compute)
        elif kind == "F":
            self._forward(stage, microbatch)
        elif kind == "W":
            self._weights(action)
        else:
            self._backward(action)

    def _forward(self, stage: int, microbatch: int) -> None:
        inputs, part = self._microbatches[microbatch], self._owner.part(stage)
        x = inputs.tokens
        if stage > 0:
            x = self._inputs[stage, microbatch] = self.wire.take(Key("F", stage, microbatch)).requires_grad_()
        output = self._owner.run_forward(part, x, inputs)
        if part.stage.head:
            self.total += output.detach()
            output = output[0] / self._divisor.to(output.dtype)
        else:
            self.wire.put(Key("F", stage + 1, microbatch), output.detach())
        self._outputs[stage, microbatch] = output

    def _backward(self, action: Action) -> None:
        """Of weights and input at once, or (I) of the input alone."""
        stage, kind, microbatch = action
        if stage == 0 and kind == "I":
            return  # nobody waits for it: all is done with the weights
        part = self._owner.part(stage)
        output = self._outputs.pop((stage, microbatch))
        gradient = None if part.stage.head else self.wire.take(Key("B", stage, microbatch))
        part.engine.begin_microbatch(last=self._owner.is_last_backward(action))
        if stage == 0:
            output.backward(gradient)
            return
        x = self._inputs.pop((stage, microbatch))
        if kind == "I":
            parameters = list(part.model.parameters())
            found, self._halves[stage, microbatch] = backward_to_input(output, gradient, x, parameters)
        else:
            output.backward(gradient)
            assert x.grad is not None
            found = x.grad
        self.wire.put(Key("B", stage - 1, microbatch), found)

    def _weights(self, action: Action) -> None:
        stage, _, microbatch = action
        if stage == 0:
            self._backward(action)
            return
        part, last = self._owner.part(stage), self._owner.is_last_backward(action)
        self._halves.pop((stage, microbatch)).finish(list(part.model.parameters()))
        if last:
            # Not before: FSDP takes the gradients of the first weights for the end of a backward.
            part.engine.begin_microbatch(last=True)
        part.engine.take_weight_gradients(last=last)


def _tied(parts: Sequence[Part], plan: PipelinePlan, meshes: Meshes) -> Tied:
    copies = {
        stage_end: next(shard for shard in part.engine.shards if shard.name == NAME)
        for part in parts
        for stage_end in ("first" * part.stage.embed, "last" * part.stage.head)
        if stage_end
    }
    return Tied(copies.get("first"), copies.get("last"), plan.ends, meshes.pp)


def _sum_over(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values
