"""The training state: `Progress`, saved as JSON, and the named tensors of model and optimizer.

`SpikeWindow`, a part of `Progress`, detects spikes of loss and gradient norm by medians, because outliers hardly change a
median.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from forge.config import StepPlan
from forge.data.order import Order, SkippedRange
from forge.optim import Optimizer
from forge.parallel.step.model import ParallelModel
from forge.shard import Shard

# The standard deviation of a normal distribution in units of its median absolute deviation.
DEVIATIONS = 1.4826
# Lower bound of the deviation, relative to the median. Otherwise, with nearly equal losses, every loss would be a
# spike.
FLOOR = 1e-3


@dataclass(frozen=True)
class Limits:
    """The limits of loss and gradient norm. A step above either limit is a spike."""

    loss: float = math.inf
    grad_norm: float = math.inf

    def exceeded(self, loss: float, grad_norm: float) -> bool:
        return loss > self.loss or grad_norm > self.grad_norm


@dataclass
class SpikeWindow:
    """Loss and gradient norm of the latest steps; part of the training state.

    Limits derive from the median and the median absolute deviation. A spike in the window therefore does not hide another
    spike. Skipped steps are not in the window, so it cannot follow a lasting new level: a phase with another mixture or
    length clears it. Non-finite numbers are left out. The limits of step n use only steps up to n - 2. When step n is
    launched, every rank has the results of these steps, even just after a resume.
    """

    size: int = 128
    threshold: float = 10.0
    entries: list[tuple[int, float, float]] = field(default_factory=list)

    def add(self, step: int, loss: float, grad_norm: float) -> None:
        """Add a step. A step with a non-finite number is ignored."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.entries.append((step, loss, grad_norm))
            # Keep one more than `size`, because `limits` may leave the latest step out.
            del self.entries[: -self.size - 1]

    def clear(self) -> None:
        """Forget all steps, because later steps may have another loss for a good reason."""
        self.entries = []

    def limits(self, step: int) -> Limits:
        """Return the limits of `step`; infinite until half of the window is filled."""
        known = [entry for entry in self.entries if entry[0] <= step - 2][-self.size :]
        if 2 * len(known) < self.size:
            return Limits()
        return Limits(
            _limit([loss for _, loss, _ in known], self.threshold),
            _limit([norm for _, _, norm in known], self.threshold),
        )

    def state(self) -> list[tuple[int, float, float]]:
        """Return the window as JSON for a checkpoint."""
        return list(self.entries)

    def load(self, state: Iterable[tuple[int, float, float]]) -> None:
        """Restore the result of the method `state`. The saved window may have had another size."""
        self.entries = [(int(step), float(loss), float(norm)) for step, loss, norm in state][-self.size - 1 :]


def _limit(values: list[float], threshold: float) -> float:
    middle = median(values)
    deviation = DEVIATIONS * median([abs(value - middle) for value in values])
    return middle + threshold * max(deviation, FLOOR * abs(middle))


@dataclass(frozen=True, kw_only=True)
class Rollback(SkippedRange):
    """A roll-back from `from_step` to the checkpoint of `to_step`, and the samples that training then skips."""

    from_step: int
    to_step: int


@dataclass
class Progress:
    """Counts since step 0 of the run.

    order: the global sample order, with the ranges skipped by roll-backs. step: number of optimizer steps, including
    skipped steps. next_sample: the first global sample of the next step. tokens: number of trained token positions.
    last_step_at: `tokens` before the last step. last_kind: `StepPlan.kind` of the last step. Both are None if unknown,
    after a checkpoint of an older version. skipped_in_a_row: skipped steps since the last good step. spikes: detector with
    the recent losses and gradient norms.
    """

    order: Order
    step: int = 0
    next_sample: int = 0
    tokens: int = 0
    last_step_at: int | None = 0
    last_kind: list[Any] | None = None
    skipped_in_a_row: int = 0
    rollbacks: list[Rollback] = field(default_factory=list)
    spikes: SpikeWindow = field(default_factory=SpikeWindow)

    def advance(self, plan: StepPlan) -> None:
        """Add one step to the counts. plan: the step's sizes."""
        self.step += 1
        self.next_sample = self.order.nth(self.next_sample, plan.windows)
        self.last_step_at, self.last_kind = self.tokens, plan.kind
        self.tokens += plan.tokens

    def rollback_to(self, saved: dict[str, Any], pass_over: bool) -> Rollback:
        """Return the `Rollback` from this step to a checkpoint with the JSON state `saved`. Do not change this object.

        pass_over: skip the samples read since that checkpoint.
        """
        then = Progress(self.order)
        then.load(saved)
        first, end = then.next_sample, self.next_sample if pass_over else then.next_sample
        drawn = then.order.between(first, end, self.order) if pass_over else {}
        return Rollback(first, end, drawn, from_step=self.step, to_step=then.step)

    def pass_over(self, rollbacks: Sequence[Rollback]) -> None:
        """Exclude the samples of `rollbacks` from the order. rollbacks: all roll-backs of the run so far."""
        self.rollbacks = list(rollbacks)
        self.order = self.order.passing_over(rollbacks)
        self.next_sample = self.order.nth(self.next_sample, 0)

    def state(self) -> dict[str, Any]:
        """Return the progress as JSON for a checkpoint."""
        return {
            "step": self.step,
            "next_sample": self.next_sample,
            "order": self.order.state(),
            "tokens": self.tokens,
            "last_step_at": self.last_step_at,
            "last_kind": self.last_kind,
            "skipped_in_a_row": self.skipped_in_a_row,
            "rollbacks": [asdict(rollback) for rollback in self.rollbacks],
            "spikes": self.spikes.state(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Restore the result of `state`. saved: the checkpoint's whole JSON state."""
        state = saved["progress"]
        for key in ("step", "next_sample", "tokens", "skipped_in_a_row"):
            setattr(self, key, int(state[key]))
        self.last_step_at, self.last_kind = state.get("last_step_at"), state.get("last_kind")
        self.order = Order.restored(state["order"], saved["inputs"]["run.seed"])
        self.pass_over([Rollback(**one) for one in state["rollbacks"]])
        self.spikes.load(state["spikes"])


def model_tensors(model: ParallelModel) -> dict[str, tuple[Shard, Tensor]]:
    """Return (shard, values) of all parameters and router state, by checkpoint name."""
    return {f"model.{shard.name}": (shard, shard.data) for shard in [*model.shards, *model.buffers]}


def all_tensors(model: ParallelModel, optimizer: Optimizer) -> dict[str, tuple[Shard, Tensor]]:
    """Return (shard, values) of all parameters, router state and optimizer state, by checkpoint name."""
    slots = {f"optimizer.{shard.name}.{slot}": (shard, values) for slot, shard, values in optimizer.tensors()}
    return model_tensors(model) | slots


def replicated_tensors(
    model: ParallelModel, optimizer: Optimizer
) -> Iterator[tuple[str, Tensor, ProcessGroup]]:
    """Yield (name, this rank's tensor, group) for all tensors that must be bit-identical across a group."""
    for name, (shard, values) in all_tensors(model, optimizer).items():
        if shard.replicas is not None and shard.boxes:
            yield name, values, shard.replicas
    yield from model.replicated_tensors()
