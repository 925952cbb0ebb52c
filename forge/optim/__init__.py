"""Optimizers over shards, and learning-rate schedules."""

import forge.optim.adamw
import forge.optim.lion
import forge.optim.muon  # noqa: F401 (all register themselves)
from forge.optim.build import build_optimizer
from forge.optim.optimizer import Optimizer
from forge.optim.schedule import decay_start, learning_rate, planned_rate

__all__ = ["Optimizer", "build_optimizer", "decay_start", "learning_rate", "planned_rate"]
