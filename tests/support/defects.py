"""Defects from public reports of other trainers, planted in forge on a layout's ranks.

Each function patches forge in the calling rank. All are at module level, because ranks unpickle them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from forge.model import Transformer
from forge.shard import Box, Shard


def bias_on_every_rank() -> None:
    """A bias added on every tp rank."""
    from torch.distributed.tensor import DTensor, Partial

    from forge.parallel.tensor import plan

    split = plan.STYLES[nn.Linear]["rowwise"]

    def rowwise(linear: Any, place: Any) -> nn.Module:
        module = split(linear, place)
        if linear.bias is None:
            return module

        def forward(x: Any) -> Any:
            own = F.linear(x.to_local(), module.weight.to_local(), module.bias.to_local())
            return DTensor.from_local(own, place.mesh, [Partial()])

        module.forward = forward
        return module

    plan.STYLES[nn.Linear]["rowwise"] = rowwise


def mean_of_means() -> None:
    """A loss averaged over ranks."""
    from forge.parallel.step.model import SequentialModel

    SequentialModel.count_tokens = lambda self, batch: (
        (batch.labels >= 0).sum().double() * dist.get_world_size()
    )


def expert_gradients_times_ep() -> None:
    """Expert gradients times ep."""
    _after_finalizing(lambda shard: 2.0 if shard.kind == "expert" else 1.0)


def divided_by_microbatches() -> None:
    """Gradients divided twice by the number of microbatches."""
    _after_finalizing(lambda shard: 0.25)


def _after_finalizing(factor: Callable[[Shard], float]) -> None:
    from forge.parallel.step.model import ParallelModel

    finalize = ParallelModel.finalize_gradients

    def scaled(self: Any) -> None:
        finalize(self)
        for shard in self.shards:
            if shard.grad is not None:
                shard.grad.mul_(factor(shard))

    ParallelModel.finalize_gradients = scaled


def partial_gradients_left_apart() -> None:
    """Partial gradients of replicated weights never summed."""
    from forge.parallel.step import model

    model.partial_shards = lambda model, shards: []


def positions_from_0() -> None:
    """Positions that start at 0 on every cp rank."""
    from forge.parallel.context.sequence import SequenceSplit

    local = SequenceSplit.local_part

    def part(self: Any, batch: Any) -> Any:
        inputs = local(self, batch)
        seq = inputs.tokens.shape[1]
        return replace(inputs, positions=torch.arange(seq).expand_as(inputs.tokens))

    SequenceSplit.local_part = part


def documents_counted_from_each_chunk() -> None:
    """A document mask without documents across cp boundaries."""
    from forge.parallel.context.sequence import SequenceSplit

    local = SequenceSplit.local_part

    def part(self: Any, batch: Any) -> Any:
        inputs = local(self, batch)
        chunks = inputs.documents.unflatten(1, (2 * self.ranks, -1))
        return replace(inputs, documents=(chunks - chunks[:, :, :1]).flatten(1))

    SequenceSplit.local_part = part


def keys_keep_their_own_gradient() -> None:
    """Keys and values without the gradient of other cp ranks."""
    from forge.parallel.context import gathered
    from forge.runtime import compat

    def all_gather(x: Tensor, group: Any) -> Tensor:
        whole = compat.all_gather(x.detach(), group)
        own = torch.zeros_like(whole)
        own[group.rank()] = 1.0
        return whole + own * (x - x.detach())

    gathered.compat = type("Compat", (), {"all_gather": staticmethod(all_gather)})


def tied_gradients_left_apart() -> None:
    """The tied gradient of the last stage dropped."""
    from forge.parallel.pipeline.tied import Tied

    Tied.sum_gradients = lambda self: None


def tied_values_left_behind() -> None:
    """The tied weight of the last stage not updated."""
    from forge.parallel.pipeline.tied import Tied

    Tied.copy_values = lambda self: None


def one_ranks_experts_are_saved() -> None:
    """A checkpoint of only one rank's experts."""
    from forge.checkpoint.store import Stager

    stage = Stager.stage

    def staged(self: Any, tensors: Any) -> Any:
        tensors = dict(tensors)
        for name, (shard, values) in tensors.items():
            if shard.kind == "expert":
                values = values.clone().contiguous()
                dist.broadcast(values, 0)
                tensors[name] = shard, values
        return stage(self, tensors)

    Stager.stage = staged


def stale_scale() -> None:
    """A stale scale of the balancing loss."""
    set_scale, seen = Transformer.set_loss_scale, set()

    def once(self: Any, scale: Tensor) -> None:
        if id(self) not in seen:
            seen.add(id(self))
            set_scale(self, scale)

    Transformer.set_loss_scale = once


def overwritten_input() -> None:
    """An in-place write to an input of recomputation."""
    from forge.model.transformer import Block

    forward = Block.forward

    def overwriting(self: Any, x: Tensor, shared: Any) -> Tensor:
        out = forward(self, x, shared)
        if torch._C._current_graph_task_id() == -1:
            x.data.mul_(0.5)
        return out

    Block.forward = overwriting


def norm_of_own_shards() -> None:
    """A gradient norm of the rank's own shards."""
    from forge.parallel.step import gradients

    class Silent:
        get_world_size = staticmethod(lambda: 1)

    gradients.dist = Silent


def weights_of_the_step_before() -> None:
    """Weights of the previous step."""
    from forge.parallel.engines.buffered import Buffered

    Buffered.after_update = lambda self, copied: None


def experts_drawn_by_local_index() -> None:
    """Experts initialised by their local index."""
    from forge.parallel import build
    from forge.parallel.initialize import initialize

    def local(shards: Any, values: Any, seed: int) -> None:
        def first(shard: Shard) -> Shard:
            boxes = tuple(Box((0,) * len(box.offsets), box.sizes) for box in shard.boxes)
            return replace(shard, boxes=boxes) if shard.kind == "expert" else shard

        initialize([first(shard) for shard in shards], values, seed)

    build.build_parallel_model.__kwdefaults__["values"] = local


def routers_move_by_local_counts() -> None:
    """Routers balanced by one rank's counts."""
    from forge.parallel.step import routers

    update = routers.Routers.update

    def alone(self: Any, skip: Tensor) -> Any:
        summed, routers.dist.all_reduce = routers.dist.all_reduce, lambda *args, **options: None
        report = update(self, skip)
        routers.dist.all_reduce = summed
        return report

    routers.Routers.update = alone


def same_samples_on_all_ranks() -> None:
    """The same samples on all data ranks."""
    from forge.tools.verify import record

    loader = record.Loader
    record.Loader = lambda *args, **options: loader(*args, **options | {"rank": 0})


def only_local_logsumexp() -> None:
    """A softmax over the rank's vocabulary shard."""
    from forge.parallel.tensor.apply import SplitVocabulary

    combine = SplitVocabulary.combine
    SplitVocabulary.combine = lambda self, lse, target: (lse, combine(self, lse, target)[1])


def rows_of_other_ranks_not_masked() -> None:
    """Tokens of other ranks' embedding rows not masked."""

    from forge.parallel.tensor import local

    def forward(self: Any, tokens: Tensor) -> Tensor:
        weight = local.local_tensor(self.weight)
        x = F.embedding((tokens - self.first_row).clamp(0, weight.shape[0] - 1), weight)
        return local.sum_to_pieces(x, self.mesh)

    local.LocalEmbedding.forward = forward


def updates_not_restored() -> None:
    """An update count lost on resume."""
    from forge.optim.adamw import AdamW

    AdamW.load_state = lambda self, state: None


def every_piece_from_the_first_file() -> None:
    """A loader reading every piece of a tensor from the first rank's file."""
    from forge.checkpoint import loading

    create = loading.DefaultLoadPlanner.create_local_plan

    def create_local_plan(self: Any) -> Any:
        plan, first, items = create(self), {}, []
        for item in plan.items:
            one = first.setdefault(item.storage_index.fqn, item)
            if item.lengths == one.lengths:
                item = replace(item, storage_index=one.storage_index, storage_offsets=one.storage_offsets)
            items.append(item)
        return replace(plan, items=items)

    loading.DefaultLoadPlanner.create_local_plan = create_local_plan
