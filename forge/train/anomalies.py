"""Policy for anomalous steps: skip and diagnose a non-finite step or spike; roll back after too many of them.

The device skips a non-finite step at once. The step's numbers reach the host while the device computes the next step's
gradients, before the next update. The model is then still in its state before the bad step, so the bad step can be
recomputed and examined. Every decision uses numbers equal on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from forge.batch import Batch
from forge.config.schema import Resilience
from forge.hook import StepResult
from forge.parallel.step.gradients import GradientReport
from forge.parallel.step.model import ParallelModel, Sums
from forge.resilience.digests import Copy, differing_copies
from forge.runtime.causes import Cause
from forge.runtime.distributed import gather_from_ranks
from forge.runtime.errors import RollbackRequired
from forge.train.state import Limits, Progress

log = logging.getLogger(__name__)

# Number of tensors shown per rank and per message.
SHOWN = 3


@dataclass(frozen=True)
class Diagnosis:
    """The result of recomputing a skipped step. where: the ranks and tensors with non-finite values."""

    cause: Cause
    loss: float
    grad_norm: float
    where: list[str]


class AnomalyPolicy:
    """Decides how training continues after each step.

    Every rank has its own policy, and all ranks make equal decisions. compute_gradients: `Trainer.compute_gradients`.
    `report_event(kind, **fields)` writes an event.
    """

    def __init__(
        self,
        config: Resilience,
        model: ParallelModel,
        progress: Progress,
        device: torch.device,
        compute_gradients: Callable[[Batch], tuple[Sums, GradientReport]],
        report_event: Callable[..., None],
    ):
        self._config, self._model, self._progress = config, model, progress
        self._device = device
        self._compute_gradients, self._report_event = compute_gradients, report_event
        self._batch: Batch | None = None
        self._limits = Limits()

    def examine(self, step: int, batch: Batch, sums: Sums, report: GradientReport) -> GradientReport:
        """Record a step before its update. `process_result` examines the step's result later.

        Return `report`. If `resilience.spikes` = skip and the step is a spike, the device sets `skip` in the returned
        report.
        """
        self._batch, self._limits = batch, self._progress.spikes.limits(step)
        if self._config.spikes == "skip" and self._limits != Limits():
            loss = sums.cross_entropy / sums.tokens.clamp(min=1)
            spike = (loss > self._limits.loss) | (report.norm > self._limits.grad_norm)
            report = replace(report, skip=torch.maximum(report.skip, spike.to(report.skip.dtype)))
        return report

    def process_result(self, result: StepResult) -> bool:
        """Act on `result`, the result of the step before the current one. Collective if that step was skipped.

        The current step's gradients are already computed. Return True if the diagnosis of a skipped step has overwritten
        them; the caller must then compute them again. Raises RollbackRequired if a roll-back is needed.
        """
        progress, skipped = self._progress, result.skipped
        diagnose = skipped and self._config.rerun_skipped_steps
        spike = not skipped and self._limits.exceeded(result.loss, result.grad_norm)
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            self._report_skipped(result, self._diagnose() if diagnose else None)
        if spike:
            self._report_spike(result)
        progress.spikes.add(result.step, result.loss, result.grad_norm)
        self._require_rollback(result, spike)
        return diagnose

    def discard_gradients(self) -> None:
        """Discard gradients and router counts of the current step. Collective."""
        self._model.zero_gradients()
        self._model.update_router(torch.ones((), device=self._device))

    def check_replicas(self, step: int, replicas: Iterable[Copy]) -> None:
        """Compare replicas across ranks before a checkpoint of `step`. Collective.

        Raises RollbackRequired if replicas differ: the wrong replica is unknown, but all were equal at the last save.
        """
        if not self._config.check_replicas:
            return
        differences = differing_copies(replicas, self._device)
        if differences:
            self._report_event(Cause.COPIES_DIFFER, step=step, differences=differences)
            more = f" (and {len(differences) - SHOWN} more)" if len(differences) > SHOWN else ""
            raise RollbackRequired(
                f"copies differ after step {step}: {'; '.join(differences[:SHOWN])}{more}",
                Cause.COPIES_DIFFER,
                first_bad=step,
                last_step=step,
                pass_over=False,
                remedy="take the nodes of these ranks out of use; their memory or arithmetic is faulty",
            )

    def _require_rollback(self, result: StepResult, spike: bool) -> None:
        limit, step = self._config.max_skipped_steps, result.step
        if self._progress.skipped_in_a_row >= limit:
            reason = f"{limit} steps in a row up to step {step} were skipped (resilience.max_skipped_steps)"
            first_bad, cause = step - limit + 1, Cause.BAD_STEPS
        elif spike and self._config.spikes == "rollback":
            reason = f"step {step} was a spike: {self._numbers(result)} (resilience.spikes)"
            first_bad, cause = step, Cause.SPIKE
        else:
            return
        remedy = "lower optimizer.lr or look at the data of these steps; events.jsonl describes each step"
        raise RollbackRequired(
            reason, cause, first_bad=first_bad, last_step=step, pass_over=True, remedy=remedy
        )

    def _diagnose(self) -> Diagnosis:
        """Compute the gradients of the skipped step again and return the diagnosis. Collective. Discards all gradients."""
        assert self._batch is not None
        self.discard_gradients()
        sums, report = self._compute_gradients(self._batch)
        values = torch.stack([sums.cross_entropy, sums.tokens, report.norm, report.skip.double()])
        cross_entropy, tokens, norm, skip = values.tolist()
        loss = cross_entropy / max(tokens, 1.0)
        bad = skip > 0 or self._limits.exceeded(loss, norm)
        where = self._not_finite() if skip > 0 else []
        self.discard_gradients()
        return Diagnosis(Cause.DETERMINISTIC if bad else Cause.TRANSIENT, loss, norm, where)

    def _not_finite(self) -> list[str]:
        """Return the ranks and tensors with non-finite local gradients, at most SHOWN tensors per rank. Collective."""
        own = []
        for shard in self._model.shards:
            if shard.grad is not None and not torch.isfinite(shard.grad).all():
                own.append(f"rank {dist.get_rank()}: {shard.name}")
            if len(own) == SHOWN:
                break
        gathered = gather_from_ranks("finding non-finite gradients", lambda: own)
        return [name for names in gathered for name in names]

    def _report_skipped(self, result: StepResult, diagnosis: Diagnosis | None) -> None:
        assert self._batch is not None
        fields: dict[str, Any] = {"first_sample": self._batch.first_sample, "cause": Cause.SKIPPED}
        text = f"step {result.step} was skipped: {self._numbers(result)}"
        if diagnosis is not None:
            fields |= {"cause": diagnosis.cause, "where": diagnosis.where}
            text += f"; computed again: {diagnosis.cause}, loss {diagnosis.loss:g}, gradient norm {diagnosis.grad_norm:g}"
            if diagnosis.where:
                text += f", not finite in {'; '.join(diagnosis.where[:SHOWN])}"
        log.warning("%s", text, extra=fields["cause"].mark)
        self._report_event(
            Cause.SKIPPED, step=result.step, loss=result.loss, grad_norm=result.grad_norm, **fields
        )

    def _report_spike(self, result: StepResult) -> None:
        numbers = self._numbers(result)
        log.warning("step %d is a spike: %s", result.step, numbers, extra=Cause.SPIKE.mark)
        self._report_event(
            Cause.SPIKE,
            step=result.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            loss_limit=self._limits.loss,
            grad_norm_limit=self._limits.grad_norm,
        )

    def _numbers(self, result: StepResult) -> str:
        text, limits = f"loss {result.loss:g}, gradient norm {result.grad_norm:g}", self._limits
        return text if limits == Limits() else f"{text} (limits {limits.loss:g}, {limits.grad_norm:g})"
