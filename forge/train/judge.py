"""What to do about a step whose loss or gradient is not as it should be.

A step that is not finite is skipped on the device, at once. Its numbers reach the host while the device works on the next
step, before that one's update: so the state is still the one in which it went wrong, the step can be computed once more
and looked into, and what follows from it is decided on numbers that are equal on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from forge.config import Config
from forge.data.loader import Batch
from forge.parallel.gradients import GradientReport
from forge.parallel.model import ParallelModel, Sums
from forge.resilience.anomalies import Limits
from forge.resilience.digests import Copy, differing_copies
from forge.train.recorder import Reading
from forge.train.state import Progress

log = logging.getLogger(__name__)

Gradients = Callable[[Batch], tuple[Sums, GradientReport]]

# Tensors that one rank, or one message, names.
SHOWN = 3


class Setback(Exception):
    """The run has to return to a checkpoint from before `first_bad`; raised on all ranks alike.

    pass_over: leave out the data from there to the end of `last_step`. remedy: what to do if returning does not help.
    """

    def __init__(self, reason: str, *, first_bad: int, last_step: int, pass_over: bool, remedy: str):
        super().__init__(reason)
        self.first_bad, self.last_step, self.pass_over = first_bad, last_step, pass_over
        self.remedy = remedy


@dataclass(frozen=True)
class Findings:
    """What computing a skipped step once more has shown. where: ranks and tensors that are not finite."""

    cause: str
    loss: float
    grad_norm: float
    where: list[str]


class Judge:
    """Takes in what every step came to. All ranks hold one and come to the same verdicts.

    `tell(kind, **fields)` writes an event.
    """

    def __init__(
        self,
        config: Config,
        progress: Progress,
        model: ParallelModel,
        device: torch.device,
        tell: Callable[..., None],
    ):
        self._resilience, self._progress = config.resilience, progress
        self._model, self._device, self._tell = model, device, tell
        self._batch: Batch | None = None

    def with_spikes(self, step: int, sums: Sums, report: GradientReport) -> tuple[Limits, GradientReport]:
        """The limits beyond which `step` is a spike; the report skips one if `resilience.spikes` says so. On the device."""
        limits = self._progress.spikes.limits(step)
        if self._resilience.spikes == "skip" and limits != Limits():
            loss = sums.cross_entropy / sums.tokens.clamp(min=1)
            spike = (loss > limits.loss) | (report.norm > limits.grad_norm)
            report = replace(report, skip=torch.maximum(report.skip, spike.to(report.skip.dtype)))
        return limits, report

    def keep(self, batch: Batch) -> None:
        """`batch` is that of the step whose reading comes next."""
        self._batch = batch

    def settle(self, reading: Reading | None, gradients: Gradients) -> bool:
        """Take in what the last step came to (None: nothing new). Collective if it was skipped.

        True if the gradients of the step under way had to be given up for it; `gradients` computes them, as the training
        loop does. Raises Setback.
        """
        if reading is None:
            return False
        rerun = reading.skipped and self._resilience.rerun_skipped_steps
        spike = not reading.skipped and reading.limits.exceeded(reading.loss, reading.grad_norm)
        if reading.skipped:
            self._progress.skipped_in_a_row += 1
            self._tell_skipped(reading, self._compute_again(reading, gradients) if rerun else None)
        else:
            self._progress.skipped_in_a_row = 0
        if spike:
            self._tell_spike(reading)
        self._progress.spikes.add(reading.step, reading.loss, reading.grad_norm)
        self._look_for_setback(reading, spike)
        return rerun

    def give_up_gradients(self) -> None:
        """Forget gradients, and what routers have counted, as if the step under way had not been begun. Collective."""
        self._model.zero_gradients()
        self._model.update_router(torch.ones((), device=self._device))

    def compare_copies(self, step: int, copies: Iterable[Copy]) -> None:
        """See that what `step` has left, and is about to be saved, is the same wherever there are copies. Collective.

        Raises Setback: of two copies nobody knows which is the right one, but both were when they were saved last.
        """
        if not self._resilience.check_replicas:
            return
        differences = differing_copies(copies, self._device)
        if differences:
            self._tell("copies_differ", step=step, differences=differences)
            more = f" (and {len(differences) - SHOWN} more)" if len(differences) > SHOWN else ""
            raise Setback(
                f"copies differ after step {step}: {'; '.join(differences[:SHOWN])}{more}",
                first_bad=step,
                last_step=step,
                pass_over=False,
                remedy="take the machines of these ranks out of use; their memory or their arithmetic is at fault",
            )

    def _look_for_setback(self, reading: Reading, spike: bool) -> None:
        limit, step = self._resilience.max_skipped_steps, reading.step
        if self._progress.skipped_in_a_row >= limit:
            reason = f"{limit} steps in a row up to step {step} were skipped (resilience.max_skipped_steps)"
            first_bad = step - limit + 1
        elif spike and self._resilience.spikes == "rollback":
            reason, first_bad = f"step {step} was a spike: {_numbers(reading)} (resilience.spikes)", step
        else:
            return
        remedy = "lower optimizer.lr or look at the data of these steps; events.jsonl says more of each"
        raise Setback(reason, first_bad=first_bad, last_step=step, pass_over=True, remedy=remedy)

    def _compute_again(self, reading: Reading, gradients: Gradients) -> Findings:
        assert self._batch is not None
        self.give_up_gradients()
        sums, report = gradients(self._batch)
        values = torch.stack([sums.cross_entropy, sums.tokens, report.norm, report.skip.double()])
        cross_entropy, tokens, norm, skip = values.tolist()
        loss = cross_entropy / max(tokens, 1.0)
        bad = skip > 0 or reading.limits.exceeded(loss, norm)
        where = self._not_finite() if skip > 0 else []
        self.give_up_gradients()
        return Findings("deterministic" if bad else "transient", loss, norm, where)

    def _not_finite(self) -> list[str]:
        """Ranks and tensors whose part of the gradient is not finite, a few of each rank."""
        mine = []
        for shard in self._model.shards:
            if shard.grad is not None and not torch.isfinite(shard.grad).all():
                mine.append(f"rank {dist.get_rank()}: {shard.name}")
            if len(mine) == SHOWN:
                break
        of_ranks: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        return [one for some in of_ranks for one in some]

    def _tell_skipped(self, reading: Reading, findings: Findings | None) -> None:
        assert self._batch is not None
        fields: dict[str, Any] = {"first_sample": self._batch.first_sample}
        text = f"step {reading.step} was skipped: {_numbers(reading)}"
        if findings is not None:
            fields |= {"cause": findings.cause, "where": findings.where}
            text += f"; computed again: {findings.cause}, loss {findings.loss:g}, gradient norm {findings.grad_norm:g}"
            if findings.where:
                text += f", not finite in {'; '.join(findings.where[:SHOWN])}"
        log.warning("%s", text)
        self._tell("skipped", step=reading.step, loss=reading.loss, grad_norm=reading.grad_norm, **fields)

    def _tell_spike(self, reading: Reading) -> None:
        limits = reading.limits
        log.warning("step %d is a spike: %s", reading.step, _numbers(reading))
        self._tell(
            "spike",
            step=reading.step,
            loss=reading.loss,
            grad_norm=reading.grad_norm,
            loss_limit=limits.loss,
            grad_norm_limit=limits.grad_norm,
        )


def _numbers(reading: Reading) -> str:
    text = f"loss {reading.loss:g}, gradient norm {reading.grad_norm:g}"
    limits = reading.limits
    return text if limits == Limits() else f"{text} (limits {limits.loss:g}, {limits.grad_norm:g})"
