"""Optimizers over shards, and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

import forge.optim.adamw
import forge.optim.lion  # noqa: F401 (both register themselves)
from forge.config.layout import Compile
from forge.config.schema import OptimizerConfig
from forge.optim.compiled import CompiledAdamW
from forge.optim.ema import WithAverage
from forge.optim.muon import Muon
from forge.optim.optimizer import Optimizer, optimizer_class, share_boxes, with_scales
from forge.optim.schedule import decay_start, learning_rate, planned_rate
from forge.shard import Shard

__all__ = ["Optimizer", "build_optimizer", "decay_start", "learning_rate", "planned_rate", "share_boxes"]


def build_optimizer(
    shards: list[Shard],
    config: OptimizerConfig,
    group: ProcessGroup | None = None,
    compiled: Compile | None = None,
    copies: Mapping[Tensor, Tensor] | None = None,
) -> Optimizer:
    """Make the optimizer `config.name`, with an average of the weights if `config.ema` is above 0.

    Call on all ranks together: Muon and int8 moments use collectives, unless the shards are from `share_boxes`.

    group: ranks that together hold every element of the parameters, with the same list of shards on each rank; None:
    only this process. Optimizers that need whole matrices, e.g. Muon, exchange parts of matrices over this group.
    compiled: compiler settings for AdamW's update, also within Muon; None: do not compile. copies: parameter -> the
    same elements in the compute dtype. The compiled update writes parameters and copies.
    """
    shards = with_scales(shards, config)
    if compiled is None:
        optimizer = optimizer_class(config.name)(shards, config, group)
    else:
        assert config.name in ("adamw", "muon"), "refused by the configuration"
        adamw = partial(CompiledAdamW, compiled=compiled, copies=copies or {})
        optimizer = (
            Muon(shards, config, group, adamw) if config.name == "muon" else adamw(shards, config, group)
        )
    return WithAverage(optimizer, shards, config.ema) if config.ema else optimizer
