"""A hook for GPU runs that raises at the first operation that synchronises with the device."""

from __future__ import annotations

import torch

from forge.hook import Hook
from forge.train.trainer import Trainer

NO_WAITS = '--train.hooks=["tests.support.no_waits:NoWaits"]'
# Steps 1 and 2 may synchronise: they allocate memory and caches.
FIRST = 3


class NoWaits(Hook):
    """From step FIRST, let PyTorch raise RuntimeError in synchronising operations."""

    def __init__(self, trainer: Trainer):
        """Take the trainer, as train.hooks requires."""

    def before_step(self, step: int) -> None:
        if step >= FIRST:
            torch.cuda.set_sync_debug_mode("error")

    def after_step(self, step: int) -> None:
        torch.cuda.set_sync_debug_mode("default")
