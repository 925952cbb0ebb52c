"""A hook for runs on a GPU: a step that waits for the device fails where it waits."""

from __future__ import annotations

import torch

from forge.hook import Hook
from forge.train.trainer import Trainer

NO_WAITS = '--train.hooks=["tests.support.no_waits:NoWaits"]'
# The first step allocates, and the second one finds what it left.
FIRST = 3


class NoWaits(Hook):
    """Let PyTorch raise a RuntimeError in operations that synchronize, in steps from FIRST on."""

    def __init__(self, trainer: Trainer):
        """A hook of a configuration is built with the trainer."""

    def before_step(self, step: int) -> None:
        if step >= FIRST:
            torch.cuda.set_sync_debug_mode("error")

    def after_step(self, step: int) -> None:
        torch.cuda.set_sync_debug_mode("default")
