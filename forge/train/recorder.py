"""From device scalars to metrics.jsonl, TensorBoard and the progress line, one step late and without a host sync."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from forge.config import Config
from forge.errors import FAILED, UserError
from forge.observe.hardware import memory_gib, peak_flops
from forge.observe.metrics import MetricsLog
from forge.observe.progress import StepTimes, format_line
from forge.observe.tensorboard import Board
from forge.parallel.execute import Sums
from forge.parallel.gradients import GradientReport
from forge.resilience.delayed import DelayedRead
from forge.train.state import Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepFacts:
    """What the host knows of a step when it has been launched; the device's numbers follow one step later."""

    step: int
    tokens: int
    lr: float


class Recorder:
    """Turns every step into at most one line. All ranks hold one, because the stop flag and the count of skipped steps
    steer all of them alike; only rank 0's has somewhere to write."""

    def __init__(
        self,
        config: Config,
        progress: Progress,
        device: torch.device,
        world_size: int,
        flops_per_token: float,
        metrics: MetricsLog | None,
        board: Board | None,
        tell_step: Callable[[int], None],
    ):
        self._config, self._progress, self._device = config, progress, device
        self._metrics, self._board, self._tell_step = metrics, board, tell_step
        self._delayed = DelayedRead(device)
        # Float8 products count against the card's float8 peak: against bfloat16's, MFU could exceed one.
        products = config.precision.compute if config.precision.float8 == "none" else "float8"
        peak = config.metrics.peak_tflops * 1e12 or peak_flops(device, products)
        self._mfu_per_token_rate = flops_per_token / (peak * world_size) if peak else None
        self._tokens_per_step = config.train.global_batch_size * config.train.seq_len
        self._times = StepTimes()
        # Since the last line; what evaluation and saving take is not among them.
        self._steps, self._seconds, self._data_seconds, self._gc_seconds = 0, 0.0, 0.0, 0.0
        self.stop_asked = False

    def record(self, facts: StepFacts, sums: Sums, report: GradientReport) -> None:
        """Take in the step just launched and write up the one before it.

        Raises UserError (exit code 1) after `resilience.max_skipped_steps` skipped steps in a row.
        """
        vector = torch.cat([sums.values, torch.stack([report.norm, report.skip.double(), report.stop])])
        self._delayed.push(facts, vector)
        while (ready := self._delayed.pop()) is not None:
            self._write(*ready)

    def add_time(self, seconds: float, data_seconds: float, gc_seconds: float) -> None:
        """Count the wall time of the step just recorded, `data_seconds` of which it waited for its batch.

        `gc_seconds` went into garbage collection since the step before; collections between steps come on top of `seconds`.

        On a GPU a step's own work is waited for in the next one's `record`, so a mean over some steps is exact but for a
        shift by one step.
        """
        self._times.add(seconds)
        self._seconds += seconds
        self._data_seconds += data_seconds
        self._gc_seconds += gc_seconds

    def flush(self) -> None:
        """Write up every step so far, waiting for the device; a kill after this loses none of it."""
        began = time.perf_counter()
        ready = self._delayed.pop(flush=True)
        self._seconds += time.perf_counter() - began
        while ready is not None:
            self._write(*ready)
            ready = self._delayed.pop(flush=True)
        if self._board is not None:
            self._board.flush()

    def evaluation(self, step: int, losses: dict[str, float]) -> None:
        """Write an evaluation line."""
        if self._metrics is None:
            return
        self._metrics.write(step=step, eval=losses)
        if self._board is not None:
            self._board.scalars(step, {f"eval/{name}": loss for name, loss in losses.items()})
        log.info("step %d  %s", step, "  ".join(f"eval {name} {loss:.4f}" for name, loss in losses.items()))

    def sample(self, step: int, text: str) -> None:
        """Show a text that the model wrote."""
        if self._board is not None:
            self._board.text(step, "sample", text)
            log.info("step %d  sample:\n%s", step, text)

    def _write(self, facts: StepFacts, values: list[float]) -> None:
        _, cross_entropy, z_loss, tokens, norm, skipped, stop = values
        self.stop_asked |= stop > 0
        self._progress.skipped_in_a_row = self._progress.skipped_in_a_row + 1 if skipped else 0
        self._steps += 1
        interval = self._config.metrics.log_interval
        due = (
            facts.step == 1 or facts.step % interval == 0 or facts.step == self._config.train.steps or skipped
        )
        if due and self._metrics is not None:
            step_time = self._seconds / self._steps
            fields: dict[str, Any] = {
                "step": facts.step,
                "loss": cross_entropy / max(tokens, 1.0),
                "grad_norm": norm,
                "lr": facts.lr,
                "tokens": facts.tokens,
                "tokens_per_second": self._tokens_per_step / step_time,
                "step_time_s": step_time,
                "data_time_s": self._data_seconds / self._steps,
                "memory_gib": memory_gib(self._device),
            }
            if self._gc_seconds:
                fields["gc_time_s"] = self._gc_seconds / self._steps
            if self._mfu_per_token_rate is not None:
                fields["mfu"] = fields["tokens_per_second"] * self._mfu_per_token_rate
            if self._config.train.z_loss_coef:
                fields["z_loss"] = z_loss / max(tokens, 1.0)
            if skipped:
                fields["skipped"] = True
            self._metrics.write(**fields)
            if self._board is not None:
                self._board.scalars(
                    facts.step, {f"train/{k}": v for k, v in fields.items() if k not in ("step", "skipped")}
                )
            self._tell_step(facts.step)
            steps = self._config.train.steps
            log.info(format_line(fields, total_steps=steps, eta_s=self._times.eta(steps - facts.step)))
        if due:
            self._steps, self._seconds, self._data_seconds, self._gc_seconds = 0, 0.0, 0.0, 0.0
        limit = self._config.resilience.max_skipped_steps
        if self._progress.skipped_in_a_row >= limit:
            raise UserError(
                f"the last {limit} steps up to step {facts.step} all had a loss or gradient that is not finite "
                f"(resilience.max_skipped_steps = {limit}); none of them changed the model. Lower optimizer.lr or "
                f"look at the data of these steps, then resume from the last checkpoint.",
                exit_code=FAILED,
            )
