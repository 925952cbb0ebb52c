"""The hook that applies phases to model and optimizer. The loader applies a phase's data keys."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from forge.config import StepPlan
from forge.hook import Hook
from forge.model import flops_per_token
from forge.optim import Optimizer
from forge.parallel.build import build_meta_model
from forge.parallel.offload import offloads
from forge.runtime.errors import UserError
from forge.train.trainer import Trainer

log = logging.getLogger(__name__)


class PhaseChanges(Hook):
    """Applies changed keys before the first step of a phase. In a phase with a ramp, applies them before each step."""

    def __init__(self, trainer: Trainer):
        self._trainer, self._last = trainer, None
        self._whole: Any = build_meta_model(trainer.config)
        phases = list(trainer.phases.stretches())
        changes = any(plan.optimizer is not trainer.config.optimizer for _, plan in phases)
        if changes and not hasattr(trainer.optimizer, "follow"):
            raise UserError(
                f'optimizer.name = "{trainer.config.optimizer.name}" has no method follow(config). Phases call it to change '
                "weight_decay, betas, eps or ema: add it (docs/internals/extending/optimizer.md), "
                "or leave these keys out of the phases"
            )

    _last: StepPlan | None

    def before_step(self, step: int) -> None:
        trainer, before = self._trainer, self._last
        plan = trainer.plan
        if plan is before:
            return
        trainer.model.micro_batch_size = plan.micro_batch_size
        if before is not None and _sizes(plan) != _sizes(before):
            for offload in (one for part in trainer.model.parts for one in offloads(part)):
                offload.forget()
        apply_plan(plan, before, [*trainer.model.parts, self._whole], trainer.optimizer)
        if before is None or (plan.tokens, plan.sliding_window) != (before.tokens, before.sliding_window):
            trainer.metrics.set_step(plan.tokens, flops_per_token(self._whole, plan.seq_len))
            log.info(
                "step %d: %d sequences of %d tokens in microbatches of %d",
                *(step, plan.global_batch_size, plan.seq_len, plan.micro_batch_size),
            )
        self._last = plan

    def after_rollback(self, step: int) -> None:
        self._last = None


def _sizes(plan: StepPlan) -> tuple[int, int]:
    return plan.micro_batch_size, plan.seq_len


def apply_plan(plan: StepPlan, before: StepPlan | None, models: Iterable[Any], optimizer: Optimizer) -> None:
    """Set the sliding windows of `models` and the keys of `optimizer` to those of `plan`, where they differ from `before`.

    before: the previous step's plan; None: set all values.
    """
    if plan.sliding_window and (before is None or plan.sliding_window != before.sliding_window):
        for block in (block for model in models for block in model.layers.values()):
            if block.attention.window > 0:
                block.attention.window = plan.sliding_window
    if (before is None or plan.optimizer is not before.optimizer) and hasattr(optimizer, "follow"):
        optimizer.follow(plan.optimizer)
