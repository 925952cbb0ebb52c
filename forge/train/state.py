"""The training state: `Progress`, saved as JSON, and the named tensors of model and optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from forge.config import StepPlan
from forge.data.order import Order, SkippedRange
from forge.optim import Optimizer
from forge.parallel.step.model import ParallelModel
from forge.resilience.spikes import SpikeWindow
from forge.shard import Shard


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
