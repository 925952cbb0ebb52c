"""Optimizers over shards, and learning-rate schedules."""

from forge.config import Config
from forge.optim.adamw import AdamW
from forge.optim.schedule import learning_rate
from forge.shard import Shard

__all__ = ["AdamW", "build_optimizer", "learning_rate"]


def build_optimizer(shards: list[Shard], config: Config) -> AdamW:
    """The optimizer that `optimizer.name` names."""
    return {"adamw": AdamW}[config.optimizer.name](shards, config)
