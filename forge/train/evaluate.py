"""Held-out loss during training."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from forge.config import Config
from forge.data.held_out import evaluation_batches
from forge.data.sources import Source
from forge.hook import Hook
from forge.parallel.mesh import Meshes
from forge.parallel.step.model import ParallelModel
from forge.runtime.causes import Cause
from forge.runtime.distributed import on_every_rank
from forge.runtime.errors import UserError
from forge.runtime.fault import fault_point
from forge.train.trainer import Trainer

log = logging.getLogger(__name__)


class Evaluation(Hook):
    """Evaluates every `evaluate.interval` steps. Unreadable held-out data causes a warning and does not end the run."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer

    def after_step(self, step: int) -> None:
        trainer = self._trainer
        if not trainer.is_due(trainer.config.evaluate.interval):
            return
        trainer.process_last_result()
        with trainer.reporter.phases.during("evaluation", step):
            fault_point("evaluation", step)
            try:
                losses = evaluate(trainer)
            except UserError as error:
                log.warning("no evaluation at step %d: %s", step, error, extra=Cause.SIDE_SYSTEM.mark)
                return
            trainer.metrics.evaluation(step, losses)
            trainer.hooks.call("after_evaluation", step, losses)


def evaluate(trainer: Trainer) -> dict[str, float]:
    """Return `held_out_losses` of the trainer's model, with the sizes and the document mask of the last step. Collective."""
    sources, config = trainer.data.validation, trainer.last_config
    return held_out_losses(trainer.model, sources, config, trainer.meshes, trainer.device)


def held_out_losses(
    model: ParallelModel, sources: Mapping[str, Source], config: Config, meshes: Meshes, device: torch.device
) -> dict[str, float]:
    """Return the mean cross-entropy of each source, over all valid tokens of `evaluate.sequences` windows. Collective.

    Losses and tokens are summed over batches and ranks before the division, so every token has equal weight in any
    layout. Raises UserError on every rank if any rank could not read its data.
    """
    losses = {}
    unreadable: list[Exception] = []
    for name, source in sources.items():
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in evaluation_batches(
            source,
            seq_len=config.train.seq_len,
            sequences=config.evaluate.sequences,
            micro_batch_size=config.train.micro_batch_size,
            rank=meshes.data_rank,
            ranks=meshes.data_ranks,
            device=device,
            document_mask=config.data.document_mask,
            unreadable=unreadable,
        ):
            sums = model.evaluate(batch)
            total += torch.stack([sums.cross_entropy, sums.tokens])
        cross_entropy, tokens = total.tolist()
        losses[name] = cross_entropy / max(tokens, 1.0)

    def raise_first() -> None:
        for error in unreadable:
            raise error

    on_every_rank("reading", raise_first)
    return losses
