"""Where a run stands: the training state that is not tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from forge.config import Config


@dataclass
class Progress:
    """Counts since the start of the run's history.

    step: optimizer updates, skipped ones included. next_sample: the global sample that the next step reads first; it
    is the whole state of the data. tokens: positions trained on. skipped_in_a_row: how many of the last steps were
    skipped without a good one between.
    """

    step: int = 0
    next_sample: int = 0
    tokens: int = 0
    skipped_in_a_row: int = 0

    def advance(self, config: Config) -> None:
        """Count one step."""
        self.step += 1
        self.next_sample += config.train.global_batch_size
        self.tokens += config.train.global_batch_size * config.train.seq_len

    def state(self) -> dict[str, Any]:
        """As JSON for a checkpoint."""
        return asdict(self)

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        for key, value in state.items():
            setattr(self, key, int(value))
