"""The table of planted defects: those of tests/support/defects.py, and faulty models, optimizers and hooks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge.hook import Hook, StepResult
from forge.model import FeedForward, Normal, Transformer
from forge.optim.optimizer import gradient, write_unless
from forge.train.trainer import Trainer
from tests.support import defects
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
{train}
[optimizer]
{optimizer}
"""
HERE = "tests.tools.verify.defects"
MOE = "[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 32\n"


def config(model: str = "", optimizer: str = "", train: str = "") -> str:
    return CONFIG.format(model=model, optimizer=optimizer, train=train)


def hooked(name: str) -> str:
    return config(train=f'hooks = ["{HERE}:{name}"]')


CONFIGS = {
    "dense": config(),
    "tied": config("tie_embeddings = true"),
    "experts": config(MOE),
    "balancing loss": config(f'{MOE}balance = "aux_loss"\naux_loss_coef = 0.3'),
    "local norm": config(f'kind = "{HERE}:LocalNormModel"'),
    "biased": config(f'kind = "{HERE}:BiasedModel"'),
    "trust": config(optimizer=f'name = "{HERE}:Trust"'),
    "good hook": hooked("GoodHook"),
    "shard clip": hooked("ShardClip"),
    "first rank": hooked("FirstRankDecays"),
    "local curve": hooked("LocalCurve"),
}


@dataclass(frozen=True)
class Defect:
    """One planted defect.

    source: a function that plants it on a layout's ranks, or a class named in `config`. culprit: a regular expression for
    the module or parameter to be named. kind: of the tensor. features: the two interacting features. origin: the layout of
    the loaded checkpoint.
    """

    source: Callable[..., object]
    config: str
    layout: str
    kind: str
    culprit: str
    features: str = ""
    fast: bool = False
    origin: str = ""

    @property
    def text(self) -> str:
        return (self.source.__doc__ or "").splitlines()[0].rstrip(".")

    @property
    def patch(self) -> Callable[..., object] | None:
        return None if isinstance(self.source, type) else self.source


class WidthNorm(nn.Module):
    """A norm over this process's features, under tensor parallelism only a part of all."""

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
    """A model whose attention has an output bias. Tensor parallelism must add it once."""

    def __init__(self, config: Any, seq_len: int, **part: Any):
        super().__init__(config, seq_len, **part)
        for block in self.layers.values():
            block.attention.wo = nn.Linear(config.dim, config.dim, bias=True)

    def initial_values(self) -> dict[str, float | Normal]:
        values = super().initial_values()
        return {name: Normal(0.1) if name.endswith(".bias") else value for name, value in values.items()}


class Trust(Descent):
    """An optimizer normalising by its shard."""

    def step(self, lr: float, skip: Tensor) -> None:
        for shard in self._shards:
            direction = gradient(shard)
            ratio = shard.data.norm() / (direction.norm() + 1e-6)
            write_unless(skip, shard.data, shard.data - lr * ratio * direction)


class GoodHook(Hook):
    """A correct hook: halve gradients and decay parameters on every rank, and report equal numbers on every layout."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def after_gradients(self, step: int) -> None:
        for shard in self.trainer.model.shards:
            if shard.grad is not None:
                shard.grad.mul_(0.5)

    def before_step(self, step: int) -> None:
        for shard in self.trainer.model.shards:
            shard.data.mul_(0.999)
        self.trainer.model.after_update()

    def after_result(self, result: StepResult) -> None:
        self.trainer.metrics.scalars(result.step, {"my/loss": result.loss, "my/tokens": float(result.tokens)})
        self.trainer.request_stop("enough")


class Clock(GoodHook):
    """A correct hook reporting a time, which differs in each run."""

    def after_result(self, result: StepResult) -> None:
        self.trainer.metrics.scalars(result.step, {"my/time": time.monotonic()})


class ShardClip(GoodHook):
    """A hook clipping each gradient by the norm of the rank's shard."""

    def after_gradients(self, step: int) -> None:
        for shard in self.trainer.model.shards:
            if shard.grad is not None:
                shard.grad.div_(1 + shard.grad.norm())


class FirstRankDecays(GoodHook):
    """A hook decaying parameters on the first rank only."""

    def before_step(self, step: int) -> None:
        if self.trainer.reporter.world.rank == 0:
            for shard in self.trainer.model.shards:
                shard.data.mul_(0.999)
        self.trainer.model.after_update()


class LocalCurve(GoodHook):
    """A hook reporting the norm of the rank's own shards."""

    def before_optimizer(self, step: int) -> None:
        grads = [shard.grad for shard in self.trainer.model.shards if shard.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        self.trainer.metrics.scalars(step, {"my/norm": norm.item()})


EXPERTS = r"feed_forward\.experts\.w\w+"
FULL = "dp_shard=2 activation_checkpoint.mode=full"

DEFECTS = [
    Defect(LocalNormModel, "local norm", "tp=2", "output", r"layers\.0\.feed_forward\.hidden_norm"),
    Defect(defects.bias_on_every_rank, "biased", "tp=2", "output", r"layers\.0\.attention\.wo"),
    Defect(defects.mean_of_means, "dense", "dp_shard=2", "loss", "loss", fast=True),
    Defect(
        defects.expert_gradients_times_ep, "experts", "dp_shard=2 ep=2", "gradient", rf"layers\.1\.{EXPERTS}"
    ),
    Defect(defects.divided_by_microbatches, "dense", "pp=2", "gradient", r"head\.weight"),
    Defect(defects.partial_gradients_left_apart, "dense", "tp=2", "gradient", r"norm\.weight"),
    Defect(defects.positions_from_0, "dense", "cp=2", "output", r"layers\.0\.attention"),
    Defect(defects.documents_counted_from_each_chunk, "dense", "cp=2", "output", r"layers\.0\.attention"),
    Defect(
        defects.keys_keep_their_own_gradient,
        "dense",
        "cp=2",
        "gradient",
        r"layers\.1\.attention\.w[kv]\.weight",
    ),
    Defect(defects.tied_gradients_left_apart, "tied", "pp=2", "gradient", r"embedding\.weight", fast=True),
    Defect(defects.tied_values_left_behind, "tied", "pp=2", "loss", "loss"),
    Defect(
        defects.one_ranks_experts_are_saved, "experts", "dp_shard=2 ep=2", "saved", rf"layers\.0\.{EXPERTS}"
    ),
    Defect(
        defects.stale_scale,
        "balancing loss",
        "dp_shard=2",
        "gradient",
        r"layers\.1\.feed_forward\.router\.weight",
    ),
    Defect(defects.overwritten_input, "dense", FULL, "gradient", r"layers\.1\..*"),
    Defect(defects.norm_of_own_shards, "dense", "dp_shard=2", "norm", "norm", fast=True),
    Defect(
        defects.weights_of_the_step_before, "dense", "dp_shard=2 data_parallel=zero1", "output", "embedding"
    ),
    Defect(
        defects.experts_drawn_by_local_index,
        "experts",
        "dp_shard=2 ep=2",
        "initial",
        rf"layers\.0\.{EXPERTS}",
    ),
    Defect(defects.routers_move_by_local_counts, "experts", "dp_shard=2", "router", r"layers\.0"),
    Defect(defects.same_samples_on_all_ranks, "dense", "dp_shard=2", "input", "embedding", fast=True),
    Defect(defects.only_local_logsumexp, "dense", "tp=2", "loss", "loss"),
    Defect(defects.rows_of_other_ranks_not_masked, "dense", "tp=2", "output", "embedding"),
    Defect(defects.updates_not_restored, "dense", "dp_shard=2", "resumed", r"parameter embedding\.weight"),
    Defect(Trust, "trust", "dp_shard=2", "parameter", r"embedding\.weight", fast=True),
    Defect(ShardClip, "shard clip", "dp_shard=2", "hooked", rf"{HERE}:ShardClip\.after_gradients", fast=True),
    Defect(FirstRankDecays, "first rank", "dp_shard=2", "hooked", rf"{HERE}:FirstRankDecays\.before_step"),
    Defect(LocalCurve, "local curve", "dp_shard=2", "curve", rf"{HERE}:LocalCurve\.before_optimizer"),
    Defect(
        defects.every_piece_from_the_first_file,
        "dense",
        "dp_replicate=2",
        "loaded",
        r"layers\.0\.attention_norm\.weight",
        origin="dp_shard=2",
    ),
]
