"""The training state: `Progress`, which is saved as JSON, and the tensors of model and optimizer under their names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from forge.config import Config
from forge.data.passed_over import Ranges, merge, nth_sample
from forge.optim import Optimizer
from forge.parallel.model import ParallelModel
from forge.resilience.spikes import SpikeWindow
from forge.shard import Shard


@dataclass(frozen=True)
class Rollback:
    """A return from `from_step` to the checkpoint of `to_step`. Since then samples from `first_sample` up to, but not
    including, `end_sample` are passed over."""

    from_step: int
    to_step: int
    first_sample: int
    end_sample: int


@dataclass
class Progress:
    """Counts since the start of the run's history.

    step: optimizer updates, skipped ones included. next_sample: the global sample that the next step reads first; with
    the samples that roll-backs pass over it is the whole state of the data. tokens: positions trained on.
    skipped_in_a_row: skipped steps since the last good one. spikes: the usual loss and gradient norm.
    """

    step: int = 0
    next_sample: int = 0
    tokens: int = 0
    skipped_in_a_row: int = 0
    rollbacks: list[Rollback] = field(default_factory=list)
    spikes: SpikeWindow = field(default_factory=SpikeWindow)

    @property
    def passed_over(self) -> Ranges:
        """Ranges of samples that are never read again."""
        return merge((rollback.first_sample, rollback.end_sample) for rollback in self.rollbacks)

    def advance(self, config: Config) -> None:
        """Count one step."""
        self.step += 1
        self.next_sample = nth_sample(self.next_sample, config.train.global_batch_size, self.passed_over)
        self.tokens += config.train.global_batch_size * config.train.seq_len

    def pass_over(self, rollbacks: list[Rollback]) -> None:
        """From here on skip the samples of `rollbacks`, which are all there have been."""
        self.rollbacks = rollbacks
        self.next_sample = nth_sample(self.next_sample, 0, self.passed_over)

    def state(self) -> dict[str, Any]:
        """The state as JSON, for a checkpoint."""
        return {
            "step": self.step,
            "next_sample": self.next_sample,
            "tokens": self.tokens,
            "skipped_in_a_row": self.skipped_in_a_row,
            "rollbacks": [asdict(rollback) for rollback in self.rollbacks],
            "spikes": self.spikes.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        for key in ("step", "next_sample", "tokens", "skipped_in_a_row"):
            setattr(self, key, int(state[key]))
        self.rollbacks = [Rollback(**rollback) for rollback in state.get("rollbacks", ())]
        self.spikes.load(state.get("spikes", ()))


def model_tensors(model: ParallelModel) -> dict[str, tuple[Shard, Tensor]]:
    """Checkpoint names of the parameters and of routers' state, each with its shard and values."""
    return {f"model.{shard.name}": (shard, shard.data) for shard in [*model.shards, *model.buffers]}


def all_tensors(model: ParallelModel, optimizer: Optimizer) -> dict[str, tuple[Shard, Tensor]]:
    """Checkpoint names of everything that is saved as tensors."""
    slots = {f"optimizer.{shard.name}.{slot}": (shard, values) for slot, shard, values in optimizer.tensors()}
    return model_tensors(model) | slots


def replicated_tensors(
    model: ParallelModel, optimizer: Optimizer
) -> Iterator[tuple[str, Tensor, ProcessGroup]]:
    """Tensors that must be bit-identical across a group: name, values of this rank, the group."""
    for name, (shard, values) in all_tensors(model, optimizer).items():
        if shard.replicas is not None and shard.boxes:
            yield name, values, shard.replicas
    yield from model.replicated_tensors()
