"""Where a run stands: the training state that is not tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from forge.config import Config
from forge.data.passed_over import Ranges, merge, nth_sample
from forge.resilience.anomalies import SpikeWindow


@dataclass(frozen=True)
class Rollback:
    """A return from `from_step` to the checkpoint of `to_step`; samples from `first_sample` up to, not including,
    `end_sample` are passed over ever since."""

    from_step: int
    to_step: int
    first_sample: int
    end_sample: int


@dataclass
class Progress:
    """Counts since the start of the run's history.

    step: optimizer updates, skipped ones included. next_sample: the global sample that the next step reads first; with
    the samples that roll-backs pass over it is the whole state of the data. tokens: positions trained on.
    skipped_in_a_row: how many of the last steps were skipped without a good one between. spikes: what is usual.
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
        """From here on read nothing that `rollbacks`, all there have been, pass over."""
        self.rollbacks = rollbacks
        self.next_sample = nth_sample(self.next_sample, 0, self.passed_over)

    def state(self) -> dict[str, Any]:
        """As JSON for a checkpoint."""
        return {
            "step": self.step,
            "next_sample": self.next_sample,
            "tokens": self.tokens,
            "skipped_in_a_row": self.skipped_in_a_row,
            "rollbacks": [asdict(rollback) for rollback in self.rollbacks],
            "spikes": self.spikes.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        for key in ("step", "next_sample", "tokens", "skipped_in_a_row"):
            setattr(self, key, int(state[key]))
        self.rollbacks = [Rollback(**rollback) for rollback in state.get("rollbacks", ())]
        self.spikes.load(state.get("spikes", ()))
