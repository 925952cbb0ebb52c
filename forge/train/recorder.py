"""From device scalars to metrics.jsonl, TensorBoard and the progress line, one step late and without a host sync."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from forge.config import Config
from forge.distributed import on_first_rank
from forge.observe.hardware import memory_gib, peak_flops
from forge.observe.metrics import MetricsLog
from forge.observe.progress import StepTimes, format_line
from forge.observe.router_load import expert_map, load_fields
from forge.observe.tensorboard import Board
from forge.parallel.gradients import GradientReport
from forge.parallel.model import Sums
from forge.parallel.routers import RouterReport
from forge.resilience.anomalies import Limits
from forge.resilience.delayed import DelayedRead

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepFacts:
    """What the host knows of a step when it has been launched; the device's numbers follow one step later."""

    step: int
    tokens: int
    lr: float
    limits: Limits


@dataclass(frozen=True)
class Reading:
    """What a step came to; the same on every rank. `loss` and `grad_norm` may be anything if it was `skipped`."""

    step: int
    loss: float
    grad_norm: float
    skipped: bool
    limits: Limits


class Recorder:
    """Turns every step into at most one line. All ranks hold one, because what a step came to steers all of them alike;
    only rank 0's has somewhere to write."""

    def __init__(
        self,
        config: Config,
        device: torch.device,
        world_size: int,
        flops_per_token: float,
        metrics: MetricsLog | None,
        board: Board,
        tell_step: Callable[[int], None],
    ):
        self._config, self._device = config, device
        self._metrics, self._board, self._tell_step = metrics, board, tell_step
        self._delayed = DelayedRead(device)
        # Float8 products count against the card's float8 peak: against bfloat16's, MFU could exceed one.
        products = config.precision.compute if config.precision.float8 == "none" else "float8"
        peak = config.metrics.peak_tflops * 1e12 or peak_flops(device, products)
        self._mfu_per_token_rate = flops_per_token / (peak * world_size) if peak else None
        self._tokens_per_step = config.train.global_batch_size * config.train.seq_len
        self._times = StepTimes()
        # Since the last line; what evaluation and saving take is not among them.
        self._restart_mean()
        self.stop_asked = False

    def record(
        self, facts: StepFacts, sums: Sums, report: GradientReport, routers: RouterReport | None = None
    ) -> None:
        """Take in the step just launched; `read` it before the next one."""
        parts = [sums.values, torch.stack([report.norm, report.skip.double(), report.stop])]
        layers: tuple[int, ...] = ()
        if routers is not None and self._due(facts.step):
            parts.append(routers.values.flatten())
            layers = routers.layers
        self._delayed.push((facts, layers), torch.cat(parts))

    def read(self, between_steps: bool = False) -> Reading | None:
        """What the step recorded last came to, once the device has ended it; written up where due. None if all is read.

        The next step may have been launched by then but for its update, so that the state is still the one that the
        step has left behind. `between_steps`: the wait counts to the step that was recorded.
        """
        began = time.perf_counter()
        ready = self._delayed.pop(flush=True)
        if between_steps:
            self._seconds += time.perf_counter() - began
        if ready is None:
            return None
        (facts, layers), values = ready
        _, cross_entropy, z_loss, tokens, norm, skipped, stop = values[:7]
        self.stop_asked |= stop > 0
        reading = Reading(facts.step, cross_entropy / max(tokens, 1.0), norm, skipped > 0, facts.limits)
        self._steps += 1
        if self._due(facts.step) or reading.skipped:
            self._write(facts, reading, z_loss / max(tokens, 1.0), layers, values[7:])
        return reading

    def add_time(self, seconds: float, data_seconds: float, gc_seconds: float) -> None:
        """Count the wall time of the step just recorded, `data_seconds` of which it waited for its batch.

        `gc_seconds` went into garbage collection since the step before; collections between steps come on top of `seconds`.
        On a GPU a step's own work is waited for in the next one, by `read`, so a mean over some steps is exact but for a
        shift by one step.
        """
        self._times.add(seconds)
        self._seconds += seconds
        self._data_seconds += data_seconds
        self._gc_seconds += gc_seconds

    def flush(self) -> Reading | None:
        """`read`, and put all lines so far where a kill loses none of them."""
        reading = self.read(between_steps=True)
        self._board.flush()
        return reading

    def begin_after(self, step: int) -> None:
        """Forget what has not been read, and what has been told of later steps than `step`: they are made again.

        Collective. Raises UserError (exit 1) on all ranks if metrics.jsonl cannot be cut.
        """
        self._delayed = DelayedRead(self._device)
        self._restart_mean()
        on_first_rank(
            "cutting metrics.jsonl", lambda: None if self._metrics is None else self._metrics.cut(step)
        )
        self._board.begin_after(step)

    def evaluation(self, step: int, losses: dict[str, float]) -> None:
        """Write an evaluation line."""
        if self._metrics is None:
            return
        self._metrics.append(step=step, eval=losses)
        self._board.scalars(step, {f"eval/{name}": loss for name, loss in losses.items()})
        log.info("step %d  %s", step, "  ".join(f"eval {name} {loss:.4f}" for name, loss in losses.items()))

    def sample(self, step: int, text: str) -> None:
        """Show a text that the model wrote."""
        if self._metrics is not None:
            self._board.text(step, "sample", text)
            log.info("step %d  sample:\n%s", step, text)

    def _due(self, step: int) -> bool:
        return self._at(self._config.metrics.log_interval, step) or self._map_due(step)

    def _map_due(self, step: int) -> bool:
        """Whether the load of every single expert is told."""
        interval = self._config.metrics.expert_map_interval
        return self._config.model.moe is not None and interval > 0 and self._at(interval, step)

    def _at(self, interval: int, step: int) -> bool:
        return step in (1, self._config.train.steps) or step % interval == 0

    def _write(
        self, facts: StepFacts, reading: Reading, z_loss: float, layers: tuple[int, ...], routers: list[float]
    ) -> None:
        if self._metrics is not None:
            step, steps, step_time = facts.step, self._config.train.steps, self._seconds / self._steps
            fields: dict[str, Any] = {
                "step": step,
                "loss": reading.loss,
                "grad_norm": reading.grad_norm,
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
                fields["z_loss"] = z_loss
            if layers:
                assert self._config.model.moe is not None
                fields |= load_fields(routers, layers, self._config.model.moe, counts=self._map_due(step))
            if reading.skipped:
                fields["skipped"] = True
            self._metrics.append(**fields)
            self._board.scalars(step, dict(_curves(fields)))
            if layers and self._map_due(step):
                counts = [of_layer["counts"] for of_layer in fields["routers"].values()]
                self._board.image(step, "routers/load", expert_map(counts))
            self._tell_step(step)
            log.info(format_line(fields, total_steps=steps, eta_s=self._times.eta(steps - step)))
        self._restart_mean()

    def _restart_mean(self) -> None:
        self._steps, self._seconds, self._data_seconds, self._gc_seconds = 0, 0.0, 0.0, 0.0


def _curves(fields: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values for TensorBoard."""
    for name, value in fields.items():
        if name == "routers":
            for layer, of_layer in value.items():
                numbers = ((key, number) for key, number in of_layer.items() if key != "counts")
                yield from ((f"routers/{layer}/{key}", number) for key, number in numbers)
        elif name not in ("step", "skipped"):
            yield f"train/{name}", value
