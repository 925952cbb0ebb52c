"""`PipelinedModel`: the `ParallelModel` of which each rank holds some layers.

One optimizer step is one run of the schedule. The loss is divided by the step's valid tokens before backward, as without
a pipeline, and nothing scales gradients afterwards. Sizes of what stages hand on are known beforehand, so no message and
no forward is spent on finding them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from forge.model import Transformer
from forge.model.precision import promoted
from forge.parallel.context import ModelInputs
from forge.parallel.data import DataParallel
from forge.parallel.layout import Layout
from forge.parallel.model import ParallelModel
from forge.parallel.pipeline.plan import PipelinePlan
from forge.parallel.pipeline.schedule import Action
from forge.parallel.pipeline.stages import Stage
from forge.parallel.pipeline.tied import NAME, Tied
from forge.parallel.pipeline.wire import Key, Wire
from forge.shard import Shard


@dataclass(frozen=True)
class Part:
    """A stage of this rank: its module, with the engine that shares it among the ranks which read other data."""

    stage: Stage
    model: Transformer
    engine: DataParallel


class PipelinedModel(ParallelModel):
    """The stages of this rank, and what it takes for them to be one model with those of the others."""

    def __init__(self, parts: Sequence[Part], plan: PipelinePlan, layout: Layout):
        super().__init__([part.model for part in parts], [part.engine for part in parts], layout)
        pp = layout.meshes.pp
        rank = pp.rank()
        self.stages = {part.stage.index: part for part in parts}
        self.plan, self.pp = plan, pp
        self._program = plan.schedule.programs[rank]
        self._forward_program = plan.schedule.forward_only().programs[rank]
        self.last_backward = plan.schedule.last_backward(rank)
        self.compute = layout.compute
        self._dim, self._vocab = layout.model.dim, layout.model.vocab_size
        self._pieces = layout.parallel.tp if layout.parallel.sequence_parallel else 1
        self._tied = None
        if layout.model.tie_embeddings:
            first = _tied_shard([part for part in parts if part.stage.embed])
            last = _tied_shard([part for part in parts if part.stage.head])
            watched = layout.check_replicas
            self._tied = Tied(first, last, plan.ends, pp, watched=watched)
            self.shards = [shard for shard in self.shards if shard is not last]

    def finalize_gradients(self) -> None:
        super().finalize_gradients()
        if self._tied is not None:
            self._tied.sum_gradients()

    def after_update(self) -> None:
        if self._tied is not None:
            self._tied.copy_values()
        super().after_update()

    def replicated_tensors(self) -> Iterator[tuple[str, Tensor, dist.ProcessGroup]]:
        yield from super().replicated_tensors()
        if self._tied is not None:
            # Not the copy itself, which a change leaves with the next update: all ranks should have seen as many, none.
            yield f"weights.{NAME} of the last stage", self._tied.take_changes(), self.pp

    def accumulation_memory_summary(self) -> str:
        return "; ".join(
            f"stage {index}: {part.engine.accumulation_memory_summary()}"
            for index, part in self.stages.items()
        )

    def _forward_backward(self, microbatches: list[ModelInputs], divisor: Tensor) -> Tensor:
        return self._run(self._program, microbatches, divisor).losses

    def _forward(self, inputs: ModelInputs) -> Tensor | None:
        done = self._run(self._forward_program, [inputs], torch.ones((), device=inputs.tokens.device))
        return done.outputs.get((self.plan.stages[-1].index, 0))

    def _logits(self, inputs: ModelInputs) -> Tensor:
        scores = self._forward(inputs)
        if scores is None:
            shape = (*inputs.tokens.shape, self._vocab)
            scores = torch.empty(shape, dtype=promoted(self.compute), device=inputs.tokens.device)
        scores = scores.contiguous()
        dist.broadcast(scores, group=self.pp, group_src=self.plan.ends[1])
        return scores

    def _run(self, program: Sequence[Action], microbatches: list[ModelInputs], divisor: Tensor) -> _Run:
        run = _Run(self, microbatches, divisor)
        for action in program:
            run.do(action)
        run.wire.close()
        return run

    def handed_on(self, inputs: ModelInputs) -> tuple[int, int, int]:
        """Shape of what stages hand on for `inputs`: `[batch, this rank's piece of the sequence, dim]`."""
        rows, seq = inputs.tokens.shape
        return rows, seq // self._pieces, self._dim

    def run_forward(self, part: Part, x: Tensor, inputs: ModelInputs) -> Tensor:
        positions = inputs.positions
        if positions is None and x.shape[1] != inputs.tokens.shape[1]:
            # From a piece of the sequence a stage cannot see how long the whole is.
            rows, seq = inputs.tokens.shape
            positions = torch.arange(seq, device=x.device).expand(rows, seq)
        return part.model(x, inputs.labels, positions, inputs.documents)


class _Run:
    """One run of a program on this rank, action by action; state is kept by (stage, microbatch).

    losses: sums of the losses that were computed here, float64 `[3]`. outputs: what no backward has taken yet.
    """

    def __init__(self, model: PipelinedModel, microbatches: list[ModelInputs], divisor: Tensor):
        self._model, self._microbatches, self._divisor = model, microbatches, divisor
        self.wire = Wire(model.pp, model.plan.schedule.rank_of, divisor.device)
        self.losses = torch.zeros(3, dtype=torch.float64, device=divisor.device)
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self._inputs: dict[tuple[int, int], Tensor] = {}
        # Of backwards in halves, what is left: the graph from each weight up to where the input's gradient came by.
        self._halves: dict[tuple[int, int], list[dict[str, Any]]] = {}

    def do(self, action: Action) -> None:
        stage, kind, microbatch = action
        if kind.startswith("SEND"):
            self.wire.send(Key(kind[-1], stage + 1 if kind[-1] == "F" else stage - 1, microbatch))
        elif kind.startswith("RECV"):
            shape = self._model.handed_on(self._microbatches[microbatch])
            self.wire.receive(Key(kind[-1], stage, microbatch), shape, self._model.compute)
        elif kind == "F":
            self._forward(stage, microbatch)
        elif kind == "W":
            self._weights(action)
        else:
            self._backward(action)

    def _forward(self, stage: int, microbatch: int) -> None:
        inputs, part = self._microbatches[microbatch], self._model.stages[stage]
        x = inputs.tokens
        if stage > 0:
            x = self.wire.take(Key("F", stage, microbatch)).requires_grad_(torch.is_grad_enabled())
            self._inputs[stage, microbatch] = x
        output = self.outputs[stage, microbatch] = self._model.run_forward(part, x, inputs)
        if not part.stage.head:
            self.wire.put(Key("F", stage + 1, microbatch), output.detach())

    def _backward(self, action: Action) -> None:
        """Of weights and input at once, or (I) of the input alone."""
        stage, kind, microbatch = action
        if stage == 0 and kind == "I":
            return  # nobody waits for it: all is done with the weights
        part = self._model.stages[stage]
        output = self.outputs.pop((stage, microbatch))
        if part.stage.head:
            self.losses += output.detach()
            output, gradient = output[0] / self._divisor.to(output.dtype), None
        else:
            gradient = self.wire.take(Key("B", stage, microbatch))
        part.engine.begin_microbatch(last=action in self._model.last_backward)
        if stage == 0:
            output.backward(gradient)
            return
        x = self._inputs.pop((stage, microbatch))
        if kind == "I":
            given = None if gradient is None else [gradient]
            parameters = part.model.parameters()
            (found,), self._halves[stage, microbatch] = stage_backward_input([output], given, [x], parameters)
            x.grad = None
        else:
            output.backward(gradient)
            found = x.grad
        assert found is not None
        self.wire.put(Key("B", stage - 1, microbatch), found)

    def _weights(self, action: Action) -> None:
        stage, _, microbatch = action
        if stage == 0:
            self._backward(action)
            return
        part, last = self._model.stages[stage], action in self._model.last_backward
        stage_backward_weight(part.model.parameters(), self._halves.pop((stage, microbatch)))
        if last:
            # Not before: FSDP takes the gradients of the first weights for the end of a backward.
            part.engine.begin_microbatch(last=True)
        part.engine.take_weight_gradients(last=last)


def _tied_shard(parts: Sequence[Part]) -> Shard | None:
    return next((shard for part in parts for shard in part.engine.shards if shard.name == NAME), None)
