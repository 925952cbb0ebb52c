"""Defects that others have had, planted in forge on the ranks of a layout, or in a model or optimizer of one's own.

Functions at module level, so that they can be sent to ranks; each patches what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from forge.model import FeedForward, Normal, Transformer
from forge.optim.optimizer import gradient, write_unless
from forge.shard import Box, Shard
from tests.support.equivalence import Descent

CONFIG = """
[model]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 4
ffn_dim = 64
vocab_size = 131
{model}
[data]
sources = [{{path = "synthetic"}}]
document_mask = true
[train]
steps = 3
seq_len = 64
global_batch_size = 8
[optimizer]
{optimizer}
"""
MOE = "[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 32\n"
CONFIGS = {
    "dense": CONFIG.format(model="", optimizer=""),
    "tied": CONFIG.format(model="tie_embeddings = true", optimizer=""),
    "experts": CONFIG.format(model=MOE, optimizer=""),
    "balancing loss": CONFIG.format(model=f'{MOE}balance = "aux_loss"\naux_loss_coef = 0.3', optimizer=""),
    "local norm": CONFIG.format(model='kind = "tests.verify.defects:LocalNormModel"', optimizer=""),
    "biased": CONFIG.format(model='kind = "tests.verify.defects:BiasedModel"', optimizer=""),
    "trust": CONFIG.format(model="", optimizer='name = "tests.verify.defects:Trust"'),
}


@dataclass(frozen=True)
class Defect:
    """`what` plants it on the ranks of a layout, or is a class that `config` names. `culprit`: a regular expression for the
    module or parameter that has to be named; `kind`: of the tensor."""

    what: Callable[..., object]
    config: str
    layout: str
    kind: str
    culprit: str
    fast: bool = False

    @property
    def text(self) -> str:
        return (self.what.__doc__ or "").splitlines()[0].rstrip(".")

    @property
    def patch(self) -> Callable[..., object] | None:
        return None if isinstance(self.what, type) else self.what


class WidthNorm(nn.Module):
    """A norm over the features that this process has: under tensor parallelism those are not all."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class NormedFeedForward(FeedForward):
    def __init__(self, dim: int, hidden_dim: int):
        super().__init__(dim, hidden_dim)
        self.hidden_norm = WidthNorm()

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.hidden_norm(F.silu(self.w1(x)) * self.w3(x)))


class LocalNormModel(Transformer):
    """A norm over the local width under tp."""

    def __init__(self, config: Any, seq_len: int, **part: Any):
        super().__init__(config, seq_len, **part)
        for block in self.layers.values():
            block.feed_forward = NormedFeedForward(config.dim, config.ffn_dim)


class BiasedModel(Transformer):
    """Its attention has a bias on the way back, which tensor parallelism must add once."""

    def __init__(self, config: Any, seq_len: int, **part: Any):
        super().__init__(config, seq_len, **part)
        for block in self.layers.values():
            block.attention.wo = nn.Linear(config.dim, config.dim, bias=True)

    def initial_values(self) -> dict[str, float | Normal]:
        values = super().initial_values()
        return {name: Normal(0.1) if name.endswith(".bias") else value for name, value in values.items()}


class Trust(Descent):
    """An optimizer that normalises by its shard."""

    def step(self, lr: float, skip: Tensor) -> None:
        for shard in self._shards:
            direction = gradient(shard)
            ratio = shard.data.norm() / (direction.norm() + 1e-6)
            write_unless(skip, shard.data, shard.data - lr * ratio * direction)


def bias_on_every_rank() -> None:
    """A bias added on every tp rank."""
    from torch.distributed.tensor import DTensor, Partial

    from forge.parallel import tensor_plan

    split = tensor_plan.STYLES[nn.Linear]["rowwise"]

    def rowwise(linear: Any, place: Any) -> nn.Module:
        module = split(linear, place)
        if linear.bias is None:
            return module

        def forward(x: Any) -> Any:
            own = F.linear(x.to_local(), module.weight.to_local(), module.bias.to_local())
            return DTensor.from_local(own, place.mesh, [Partial()])

        module.forward = forward
        return module

    tensor_plan.STYLES[nn.Linear]["rowwise"] = rowwise


def mean_of_means() -> None:
    """A loss averaged over ranks."""
    from forge.parallel.model import SequentialModel

    SequentialModel.count_tokens = lambda self, batch: (
        (batch.labels >= 0).sum().double() * dist.get_world_size()
    )


def expert_gradients_times_ep() -> None:
    """Gradients of experts times ep."""
    _after_finalizing(lambda shard: 2.0 if shard.kind == "expert" else 1.0)


def divided_by_microbatches() -> None:
    """Gradients divided by the number of microbatches a second time."""
    _after_finalizing(lambda shard: 0.25)


def _after_finalizing(factor: Callable[[Shard], float]) -> None:
    from forge.parallel.model import ParallelModel

    finalize = ParallelModel.finalize_gradients

    def scaled(self: Any) -> None:
        finalize(self)
        for shard in self.shards:
            if shard.grad is not None:
                shard.grad.mul_(factor(shard))

    ParallelModel.finalize_gradients = scaled


def partial_gradients_left_apart() -> None:
    """Partial gradients of replicated weights never summed."""
    from forge.parallel import model

    model.partial_shards = lambda model, shards: []


def positions_from_0() -> None:
    """Positions that start at 0 on every cp rank."""
    from forge.parallel.context.sequence import SequenceSplit

    local = SequenceSplit.local_part

    def part(self: Any, batch: Any) -> Any:
        inputs = local(self, batch)
        seq = inputs.tokens.shape[1]
        return inputs._replace(positions=torch.arange(seq).expand_as(inputs.tokens))

    SequenceSplit.local_part = part


def documents_counted_from_each_chunk() -> None:
    """A mask that forgets documents at the borders of cp."""
    from forge.parallel.context.sequence import SequenceSplit

    local = SequenceSplit.local_part

    def part(self: Any, batch: Any) -> Any:
        inputs = local(self, batch)
        chunks = inputs.documents.unflatten(1, (2 * self.ranks, -1))
        return inputs._replace(documents=(chunks - chunks[:, :, :1]).flatten(1))

    SequenceSplit.local_part = part


def keys_keep_their_own_gradient() -> None:
    """Keys and values without the gradient of other cp ranks."""
    from forge import compat
    from forge.parallel.context import gathered

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
    """A checkpoint that saves one rank's experts."""
    from forge.checkpoint.tensors import Stager

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
    """A write into an activation that recomputation reads."""
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
    from forge.parallel import gradients

    class Silent:
        get_world_size = staticmethod(lambda: 1)

    gradients.dist = Silent


def weights_of_the_step_before() -> None:
    """Weights of the step before."""
    from forge.parallel.buffered import Buffered

    Buffered.after_update = lambda self: None


def experts_drawn_by_local_index() -> None:
    """Experts drawn by their index on the rank."""
    from forge.parallel import build
    from forge.parallel.initialize import initialize

    def local(shards: Any, values: Any, seed: int) -> None:
        true = {shard.name: shard.boxes for shard in shards}
        for shard in shards:
            if shard.kind == "expert":
                shard.boxes = tuple(Box((0,) * len(box.offsets), box.sizes) for box in shard.boxes)
        initialize(shards, values, seed)
        for shard in shards:
            shard.boxes = true[shard.name]

    build.build_parallel_model.__kwdefaults__["values"] = local


def routers_move_by_local_counts() -> None:
    """Routers balanced by one rank's counts."""
    from forge.parallel import routers

    update = routers.Routers.update

    def alone(self: Any, skip: Tensor) -> Any:
        summed, routers.dist.all_reduce = routers.dist.all_reduce, lambda *args, **options: None
        report = update(self, skip)
        routers.dist.all_reduce = summed
        return report

    routers.Routers.update = alone


def same_samples_on_all_ranks() -> None:
    """The same samples on all data ranks."""
    from forge.verify import record

    loader = record.Loader
    record.Loader = lambda *args, **options: loader(*args, **options | {"rank": 0})


def only_local_logsumexp() -> None:
    """A softmax over a rank's part of the vocabulary."""
    from forge.parallel.tensor import SplitHead

    combine = SplitHead.combine
    SplitHead.combine = lambda self, lse, target: (lse, combine(self, lse, target)[1])


def rows_of_other_ranks_not_masked() -> None:
    """Tokens of other ranks' rows not masked."""
    from forge.parallel import tensor_local

    def forward(self: Any, tokens: Tensor) -> Tensor:
        weight = tensor_local.local_tensor(self.weight)
        x = F.embedding((tokens - self.first_row).clamp(0, weight.shape[0] - 1), weight)
        return tensor_local.sum_to_pieces(x, self.mesh)

    tensor_local.LocalEmbedding.forward = forward


def updates_not_restored() -> None:
    """A count of updates that a resume forgets."""
    from forge.optim.adamw import AdamW

    AdamW.load_state = lambda self, state: None


EXPERTS = r"feed_forward\.experts\.w\w+"
FULL = "dp_shard=2 activation_checkpoint.mode=full"

DEFECTS = [
    Defect(LocalNormModel, "local norm", "tp=2", "output", r"layers\.0\.feed_forward\.hidden_norm"),
    Defect(bias_on_every_rank, "biased", "tp=2", "output", r"layers\.0\.attention\.wo"),
    Defect(mean_of_means, "dense", "dp_shard=2", "loss", "loss", fast=True),
    Defect(expert_gradients_times_ep, "experts", "dp_shard=2 ep=2", "gradient", rf"layers\.1\.{EXPERTS}"),
    Defect(divided_by_microbatches, "dense", "pp=2", "gradient", r"head\.weight"),
    Defect(partial_gradients_left_apart, "dense", "tp=2", "gradient", r"norm\.weight"),
    Defect(positions_from_0, "dense", "cp=2", "output", r"layers\.0\.attention"),
    Defect(documents_counted_from_each_chunk, "dense", "cp=2", "output", r"layers\.0\.attention"),
    Defect(keys_keep_their_own_gradient, "dense", "cp=2", "gradient", r"layers\.1\.attention\.w[kv]\.weight"),
    Defect(tied_gradients_left_apart, "tied", "pp=2", "gradient", r"embedding\.weight", fast=True),
    Defect(tied_values_left_behind, "tied", "pp=2", "loss", "loss"),
    Defect(one_ranks_experts_are_saved, "experts", "dp_shard=2 ep=2", "saved", rf"layers\.0\.{EXPERTS}"),
    Defect(
        stale_scale, "balancing loss", "dp_shard=2", "gradient", r"layers\.1\.feed_forward\.router\.weight"
    ),
    Defect(overwritten_input, "dense", FULL, "gradient", r"layers\.1\..*"),
    Defect(norm_of_own_shards, "dense", "dp_shard=2", "norm", "norm", fast=True),
    Defect(weights_of_the_step_before, "dense", "dp_shard=2 data_parallel=zero1", "output", "embedding"),
    Defect(experts_drawn_by_local_index, "experts", "dp_shard=2 ep=2", "initial", rf"layers\.0\.{EXPERTS}"),
    Defect(routers_move_by_local_counts, "experts", "dp_shard=2", "router", r"layers\.0"),
    Defect(same_samples_on_all_ranks, "dense", "dp_shard=2", "input", "embedding", fast=True),
    Defect(only_local_logsumexp, "dense", "tp=2", "loss", "loss"),
    Defect(rows_of_other_ranks_not_masked, "dense", "tp=2", "output", "embedding"),
    Defect(updates_not_restored, "dense", "dp_shard=2", "resumed", r"parameter embedding\.weight"),
    Defect(Trust, "trust", "dp_shard=2", "parameter", r"embedding\.weight", fast=True),
]
