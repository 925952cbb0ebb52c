"""`PipelinedModel`: a `ParallelModel` with some layers on each rank.

One optimizer step executes this rank's program (`Schedule.programs`), action by action:

    RECV_F  F  SEND_F           the activation goes to the next stage
    RECV_B  B  SEND_B           the gradient of the stage's input goes to the previous stage
    RECV_B  I  SEND_B  ...  W   like B, but the gradients of the weights are computed later

The loss is divided by the step's valid tokens before backward, as without a pipeline, and nothing scales gradients
afterwards. Activation shapes follow from the configuration, so they need no messages and no extra forwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.batch import Batch
from forge.model import Transformer
from forge.model.norm import promoted
from forge.parallel.layout import Layout
from forge.parallel.mesh import new_group
from forge.parallel.pipeline.plan import PipelinePlan, Stage
from forge.parallel.pipeline.schedule import Action
from forge.parallel.pipeline.tied import NAME, Tied
from forge.parallel.step.model import DataParallel, ParallelModel
from forge.runtime import compat
from forge.shard import Shard


@dataclass(frozen=True)
class StageModel:
    """A pipeline stage on this rank: its module and its data-parallel engine."""

    stage: Stage
    model: Transformer
    engine: DataParallel


class PipelinedModel(ParallelModel):
    """A `ParallelModel` whose parts are this rank's stages of a pipeline."""

    def __init__(self, parts: Sequence[StageModel], plan: PipelinePlan, layout: Layout):
        super().__init__([part.model for part in parts], [part.engine for part in parts], layout)
        pp = layout.meshes.pp
        rank = pp.rank()
        self.stages = {part.stage.index: part for part in parts}
        self.plan, self.pp = plan, pp
        self.neighbours = neighbour_groups(pp, plan.schedule.rank_of)
        self._microbatches, self._program = plan.schedule.microbatches, plan.schedule.programs[rank]
        if any(action.kind == "I" for action in self._program):
            compat.keep_buffers_of_compiled_backward()
        self._forward_program = plan.schedule.forward_only().programs[rank]
        self.last_backward = plan.schedule.last_backward(rank)
        self.compute = layout.compute
        # An extension point, so the planner can run a rank without its peers.
        self.isend: Callable[..., dist.Work | None] = dist.isend
        self._config = layout.model
        self._pieces = layout.parallel.tp if layout.parallel.sequence_parallel else 1
        self.tied = None
        if layout.model.embedding_at_both_ends:
            first = _tied_shard([part for part in parts if part.stage.embed])
            last = _tied_shard([part for part in parts if part.stage.head])
            self.tied = Tied(first, last, plan.ends, pp, watched=layout.check_replicas)
            # The gradient norm, the optimizer and checkpoints see only the first stage's copy of the tied weight.
            self.shards = [shard for shard in self.shards if shard is not last]

    def finalize_gradients(self) -> None:
        super().finalize_gradients()
        if self.tied is not None:
            self.tied.sum_gradients()

    def after_update(self, copied: Collection[Tensor] = ()) -> None:
        if self.tied is not None:
            self.tied.copy_values()
        super().after_update(copied)

    def replicated_tensors(self) -> Iterator[tuple[str, Tensor, dist.ProcessGroup]]:
        yield from super().replicated_tensors()
        if self.tied is not None:
            # Yield the number of unexpected changes, not the copy itself, because the next update overwrites a change.
            # All other ranks yield 0.
            yield f"weights.{NAME} of the last stage", self.tied.take_changes(), self.pp

    def accumulation_memory_summary(self) -> str:
        return "; ".join(
            f"stage {index}: {part.engine.accumulation_memory_summary()}"
            for index, part in self.stages.items()
        )

    def _forward_backward(self, microbatches: list[Batch], divisor: Tensor) -> Tensor:
        if len(microbatches) != self._microbatches:
            schedule, rank = self.plan.with_microbatches(len(microbatches)), self.pp.rank()
            self._microbatches, self._program = len(microbatches), schedule.programs[rank]
            self.last_backward = schedule.last_backward(rank)
        return self._execute(self._program, microbatches, divisor).losses

    def _forward(self, inputs: Batch) -> Tensor | None:
        done = self._execute(self._forward_program, [inputs], torch.ones((), device=inputs.tokens.device))
        return done.outputs.get((self.plan.stages[-1].index, 0))

    def _logits(self, inputs: Batch) -> Tensor:
        """Return logits `[batch, seq, vocab]` on all pp ranks. The rank of the last stage broadcasts them. Collective."""
        scores = self._forward(inputs)
        if scores is None:
            shape = (*inputs.tokens.shape, self._config.vocab_size)
            scores = torch.empty(shape, dtype=promoted(self.compute), device=inputs.tokens.device)
        scores = scores.contiguous()
        dist.broadcast(scores, group=self.pp, group_src=self.plan.ends[1])
        return scores

    def _execute(self, program: Sequence[Action], microbatches: list[Batch], divisor: Tensor) -> _ProgramRun:
        run = _ProgramRun(self, microbatches, divisor)
        for action in program:
            run.do(action)
        run.messages.close()
        return run

    def activation_shape(self, inputs: Batch, layer: int) -> tuple[int, ...]:
        """Return the shape of the activation that a stage receives for `inputs`. layer: the stage's first layer.

        `[batch, this rank's piece of the sequence, dim]`; with attention residuals `[streams, batch, ...]`.
        """
        rows, seq = inputs.tokens.shape
        shape = rows, seq // self._pieces, self._config.dim
        mixes = self._config.residual == "attention"
        return (self._config.streams_into(layer), *shape) if mixes else shape

    def run_forward(self, part: StageModel, x: Tensor, inputs: Batch) -> Tensor:
        """Return the output of stage `part`.

        x: tokens `[batch, seq]` for the first stage, otherwise the previous stage's activation.
        """
        positions = inputs.positions
        piece = x.shape[1] if part.stage.embed else x.shape[-2]
        if positions is None and piece != inputs.tokens.shape[1]:
            # A stage receiving a piece of the sequence cannot see the length of the whole sequence.
            rows, seq = inputs.tokens.shape
            positions = torch.arange(seq, device=x.device).expand(rows, seq)
        self.begin_losses(inputs)
        return part.model(x, *replace(inputs, positions=positions).arguments[1:])


class _ProgramRun:
    """One execution of a program on this rank.

    losses: sums of the losses computed on this rank, float64 `[3]`. outputs: (stage, microbatch) -> output of a forward
    whose backward has not run yet.
    """

    def __init__(self, model: PipelinedModel, microbatches: list[Batch], divisor: Tensor):
        self._model, self._microbatches, self._divisor = model, microbatches, divisor
        self.messages = Messages(model, divisor.device)
        self.losses = torch.zeros(3, dtype=torch.float64, device=divisor.device)
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self._inputs: dict[tuple[int, int], Tensor] = {}
        # PyTorch's state from each I for the W of the same microbatch: the part of the autograd graph between the
        # weights and the path of the input's gradient.
        self._weight_graphs: dict[tuple[int, int], list[dict[str, Any]]] = {}

    def do(self, action: Action) -> None:
        stage, kind, microbatch = action
        if kind == "SEND_F":
            self.messages.send(Action(stage + 1, "F", microbatch))
        elif kind == "SEND_B":
            self.messages.send(Action(stage - 1, "B", microbatch))
        elif kind in ("RECV_F", "RECV_B"):
            # The gradient of a stage's output has the shape of the next stage's input.
            layers = self._model.stages[stage].stage.layers
            layer = layers.start if kind == "RECV_F" else layers.stop
            shape = self._model.activation_shape(self._microbatches[microbatch], layer)
            self.messages.receive(Action(stage, kind[-1], microbatch), shape, self._model.compute)
        elif kind == "F":
            self._forward(stage, microbatch)
        elif kind == "W":
            self._backward_weights(action)
        else:
            self._backward(action)

    def _forward(self, stage: int, microbatch: int) -> None:
        inputs, part = self._microbatches[microbatch], self._model.stages[stage]
        x = inputs.tokens
        if stage > 0:
            # Make x a leaf: backward stops at x, and the gradient of x is sent to the previous stage.
            x = self.messages.take(Action(stage, "F", microbatch))
            self._inputs[stage, microbatch] = x.requires_grad_(torch.is_grad_enabled())
        output = self.outputs[stage, microbatch] = self._model.run_forward(part, x, inputs)
        if not part.stage.head:
            self.messages.put(Action(stage + 1, "F", microbatch), output.detach())

    def _backward(self, action: Action) -> None:
        """Compute the gradients of weights and input (kind B), or of the input alone (kind I)."""
        stage, kind, microbatch = action
        if stage == 0 and kind == "I":
            return  # tokens need no gradient, so W runs the whole backward
        part = self._model.stages[stage]

        # The last stage starts from its loss, every other stage from the gradient of its output.
        output = self.outputs.pop((stage, microbatch))
        if part.stage.head:
            self.losses += output.detach()
            output, gradient = output[0] / self._divisor.to(output.dtype), None
        else:
            gradient = self.messages.take(Action(stage, "B", microbatch))

        part.engine.begin_microbatch(last=action in self._model.last_backward)
        if stage == 0:
            output.backward(gradient)
            return
        x = self._inputs.pop((stage, microbatch))
        if kind == "I":
            given = None if gradient is None else [gradient]
            parameters = part.model.parameters()
            # Imported lazily, because torch.distributed.pipelining loads PyTorch's compiler, which takes most of a
            # second.
            from torch.distributed.pipelining._backward import stage_backward_input

            (found,), graphs = stage_backward_input([output], given, [x], parameters)
            self._weight_graphs[stage, microbatch] = graphs
            x.grad = None
        else:
            output.backward(gradient)
            found = x.grad
        assert found is not None
        self.messages.put(Action(stage - 1, "B", microbatch), found)

    def _backward_weights(self, action: Action) -> None:
        stage, _, microbatch = action
        if stage == 0:
            self._backward(action)
            return
        part, last = self._model.stages[stage], action in self._model.last_backward
        from torch.distributed.pipelining._backward import stage_backward_weight

        stage_backward_weight(part.model.parameters(), self._weight_graphs.pop((stage, microbatch)))
        if last:
            # Announce the last backward only now: earlier, FSDP would take the first weight gradient for the end of a
            # backward.
            part.engine.begin_microbatch(last=True)
        part.engine.take_weight_gradients(last=last)


class Messages:
    """Activations and their gradients between stages. A tensor is sent only if the neighbour stage is on another rank.

    Each tensor is stored under the action that needs it. For F, the tensor is the input of the action's stage; for B,
    the gradient of the stage's output. `take` waits only for the tensor it returns.
    """

    def __init__(self, model: PipelinedModel, device: torch.device):
        self._groups, self._rank_of = model.neighbours, model.plan.schedule.rank_of
        self._isend, self._device = model.isend, device
        self._here: dict[Action, Tensor] = {}
        self._receiving: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def put(self, user: Action, tensor: Tensor) -> None:
        """Store `tensor` until `take` or `send`. user: the action that needs the tensor."""
        self._here[user] = compat.arrived(tensor)

    def take(self, user: Action) -> Tensor:
        """Return the tensor put or received for `user`, and remove it. Waits for a tensor that is still being received."""
        if user in self._here:
            return self._here.pop(user)
        work, tensor = self._receiving.pop(user)
        work.wait()
        return tensor

    def send(self, user: Action) -> None:
        """Start sending the tensor stored by `put` for `user` to the rank of `user.stage`."""
        tensor = self._here.pop(user).contiguous()
        work = self._isend(tensor, **self._with(user.stage, "group_dst"))
        assert work is not None
        self._sending.append((work, tensor))
        # A tensor must live until it is sent. Free the tensors already sent; `close` waits for the rest.
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def receive(self, user: Action, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Start receiving the tensor needed by the action `user`.

        For F, the tensor is the activation from the previous stage; for B, the gradient from the next stage.
        """
        source = user.stage - 1 if user.kind == "F" else user.stage + 1
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        work = dist.irecv(tensor, **self._with(source, "group_src"))
        assert work is not None
        self._receiving[user] = work, tensor

    def _with(self, stage: int, key: str) -> dict[str, Any]:
        """Return the keyword arguments of a send or receive between this rank and the rank of `stage`.

        They are the group of the two ranks and the other rank's index in this group. key: the argument for the index,
        group_src or group_dst.
        """
        group = self._groups[self._rank_of[stage]]
        return {"group": group, key: 1 - group.rank()}

    def close(self) -> None:
        """Wait until all tensors are sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        assert not (self._here or self._receiving), "messages that no stage took"


def _tied_shard(parts: Sequence[StageModel]) -> Shard | None:
    return next((shard for part in parts for shard in part.engine.shards if shard.name == NAME), None)


def neighbour_groups(pipeline: dist.ProcessGroup, rank_of: Sequence[int]) -> dict[int, dist.ProcessGroup]:
    """Return a two-rank group for each rank that holds a stage adjacent to one of this rank's stages.

    Keys: the other rank's index in `pipeline`. Collective over all ranks. rank_of: stage -> its rank in the pipeline.
    """
    ranks, own, world = pipeline.size(), pipeline.rank(), dist.group.WORLD
    if ranks <= 2:
        return dict.fromkeys(range(ranks), pipeline)
    assert world is not None
    # Groups made in one call must not overlap.
    rounds: list[list[tuple[int, ...]]] = []
    for pair in sorted({tuple(sorted(two)) for two in pairwise(rank_of) if two[0] != two[1]}):
        free = (made for made in rounds if not set(pair) & {rank for other in made for rank in other})
        if (joined := next(free, None)) is None:
            rounds.append(joined := [])
        joined.append(pair)
    stride, found = world.size() // ranks, {}  # pp is the slowest axis
    for pairs in rounds:
        # A rank without a pair makes a group of one rank. A group's name contains the number of groups made before, so
        # every rank must make equally many groups.
        alone = [(rank,) for rank in range(ranks) if rank not in {r for pair in pairs for r in pair}]
        sets = [[stride * r + line for r in few] for few in [*pairs, *alone] for line in range(stride)]
        group = new_group(world, sets, on_cpu=False)
        for pair in pairs:
            if own in pair:
                found[sum(pair) - own] = group
    return found
