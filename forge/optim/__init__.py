"""Optimizers over shards, and learning-rate schedules."""

from forge.optim.optimizer import Optimizer, build_optimizer, share_boxes
from forge.optim.schedule import decay_start, learning_rate, planned_rate

__all__ = ["Optimizer", "build_optimizer", "decay_start", "learning_rate", "planned_rate", "share_boxes"]
