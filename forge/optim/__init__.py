"""Optimizers over shards, and learning-rate schedules."""

import forge.optim.adamw  # noqa: F401 (registers itself)
from forge.optim.optimizer import Optimizer, build_optimizer
from forge.optim.schedule import decay_start, learning_rate

__all__ = ["Optimizer", "build_optimizer", "decay_start", "learning_rate"]
