"""Write the run's measurements to metrics.jsonl, TensorBoard, trackers and the progress line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from forge.config import Config, Phases
from forge.hook import Hook, StepResult
from forge.observe.collector import Collector
from forge.observe.hardware import memory_gib, peak_flops
from forge.observe.json_lines import JsonLines, read_lines, warn_of_gap
from forge.observe.live import TrainingLine
from forge.observe.monitors import is_monitored
from forge.observe.progress import StepTimes
from forge.observe.router_load import expert_map, load_fields
from forge.observe.run_directory import RunDirectory
from forge.observe.tensorboard import Board
from forge.observe.trackers import Tracker, make_trackers
from forge.runtime.distributed import on_first_rank
from forge.runtime.errors import redact_all
from forge.runtime.terminal import printable
from forge.runtime.world import World

log = logging.getLogger(__name__)


class MetricsWriter(Hook):
    """Writes at most one training line per step, on the first rank only.

    `report_step(step)` is called with each line. products: dtype of matrix products, or "float8"; MFU is relative to
    the peak in this dtype.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        directory: RunDirectory,
        flops_per_token: float,
        products: str,
        collector: Collector,
        report_step: Callable[[int], None],
    ):
        self._config, self._device, self._collector = config, world.device, collector
        self._report_step = report_step
        self._phases = Phases(config)
        self._published: dict[str, Any] = {}
        # Numbers from before `restart_from`, e.g. from a hook's constructor.
        self._waiting: list[tuple[int, Mapping[str, float]]] | None = []
        self._log = JsonLines(directory.metrics) if world.rank == 0 else None
        self._board = Board(directory.tensorboard, world.rank == 0 and config.metrics.tensorboard)
        self._trackers: list[Tracker] = []
        if world.rank == 0:
            settings = dict(flat(redact_all(config.model_dump(mode="json"))))
            self._trackers = make_trackers(
                config.metrics.trackers,
                directory.root,
                config.run.name,
                settings,
                lambda: history(directory.metrics),
            )
        self._world_size, self._products = world.size, products
        self.set_step(config.train.global_batch_size * config.train.seq_len, flops_per_token)
        self._times = StepTimes()
        self._step_began: float | None = None
        self._step_ended: float | None = None
        self._restart_means()

    def set_step(self, tokens: int, flops_per_token: float) -> None:
        """Set the tokens per step and FLOPs per token of the steps that `after_step` measures from now on."""
        self._tokens_per_step = tokens
        self._mfu_of_rate = mfu_of_rate(
            self._config, self._device, self._products, self._world_size, flops_per_token
        )

    def wants_routers(self, step: int) -> bool:
        """Return whether the router report of `step` is needed, for a training line or a monitor line."""
        return self.is_due(step) or is_monitored(self._config.metrics, step)

    def before_data(self, step: int) -> None:
        self._step_began = time.perf_counter()
        if self._step_ended is not None:
            self._times.pause(self._step_began - self._step_ended)

    def after_data(self, step: int) -> None:
        assert self._step_began is not None
        self._step_data_s = time.perf_counter() - self._step_began

    def after_step(self, step: int) -> None:
        """Measure this step's wall time.

        The time of evaluations and saves after the step counts as a pause. On a GPU the host waits for a step's work
        during the next step. A mean over several steps is therefore exact, but shifted by one step.
        """
        assert self._step_began is not None
        self._step_ended = time.perf_counter()
        seconds = self._step_ended - self._step_began
        self._step_began = None
        self._times.add(seconds)
        self._seconds += seconds
        self._tokens += self._tokens_per_step
        self._products_s += self._tokens_per_step * (self._mfu_of_rate or 0.0)
        self._data_s += self._step_data_s
        self._gc_s += self._collector.take_seconds()

    def after_result(self, result: StepResult) -> None:
        if self._step_began is None:  # between steps: the wait belongs to the finished step
            self._seconds += result.waited_s
        self._steps += 1
        if self.is_due(result.step) or result.skipped:
            if self._log is not None:
                self._write(self._log, result)
            self._restart_means()

    def writes(self, result: StepResult) -> bool:
        """Return whether this rank writes a training line for the step of `result`."""
        return self._log is not None and (self.is_due(result.step) or result.skipped)

    def publish(self, step: int, fields: Mapping[str, Any]) -> None:
        """Add fields to the training line of `step`. Call before this writer's `after_result`, which writes the line."""
        if self._published.get("step") != step:
            self._published = {"step": step}
        self._published |= fields

    def before_save(self, step: int) -> None:
        """Write buffered curves to the file, because a run resumed at this step continues them."""
        self._board.flush()

    def after_run(self) -> None:
        self._board.close()
        for tracker in self._trackers:
            tracker.close()

    def restart_from(
        self, step: int, rollbacks: int, inputs: Mapping[str, Any], origin: int = 0, aside: bool = False
    ) -> Path | None:
        """Remove the output of steps after `step` (-1: of all steps), because these steps are repeated.

        Collective. rollbacks: number of roll-backs of the run so far. inputs: fingerprints of the data. origin: the step at
        which the history began. With `aside`, keep the old metrics.jsonl and return its new name. Raises UserError (exit 1)
        on all ranks if metrics.jsonl cannot be cut.
        """
        self._restart_means()
        self._board.discard_after(max(step, 0))

        def cut() -> Path | None:
            assert self._log is not None
            kept = self._log.cut(step, aside)
            warn_of_gap(self._log.path, step, self._config.metrics.log_interval, origin)
            return kept

        kept = on_first_rank("cutting metrics.jsonl", cut)
        for tracker in self._trackers:
            tracker.discard_after(step, aside or step < 0, rollbacks, inputs)
        waiting, self._waiting = self._waiting or [], None
        for at, values in waiting:
            self._show(at, values)
        return kept

    def sync(self) -> None:
        """Sync all lines of metrics.jsonl to disk."""
        if self._log is not None:
            self._log.sync()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers to the curves of TensorBoard and trackers. values: curve name, e.g. `my/number` -> number."""
        if self._waiting is None:
            self._show(step, values)
        else:
            self._waiting.append((step, values))

    def evaluation(self, step: int, losses: Mapping[str, float]) -> None:
        """Write an evaluation line. losses: held-out source -> loss."""
        if self._log is None:
            return
        self._log.append(step=step, eval=dict(losses))
        self._show(step, dict(_curves({"eval": losses})))
        log.info("step %d  %s", step, "  ".join(f"eval {name} {loss:.4f}" for name, loss in losses.items()))

    def monitors(self, step: int, found: Mapping[str, Any]) -> None:
        """Write a monitor line. found: monitor -> layer or parameter -> numbers."""
        if self._log is not None:
            self._log.append(step=step, monitors=dict(found))
            self._show(step, dict(_curves({"monitors": found})))

    def tasks(self, step: int, scores: Mapping[str, Mapping[str, Any]]) -> None:
        """Write a line of task scores. scores: task -> metric -> value."""
        if self._log is not None:
            numbers = {
                task: {name: value for name, value in found.items() if isinstance(value, int | float)}
                for task, found in scores.items()
            }
            self._log.append(step=step, tasks=numbers)
            self._show(step, dict(_curves({"tasks": numbers})))
            for task, found in numbers.items():
                log.info(
                    "step %d  %s: %s",
                    step,
                    task,
                    "  ".join(f"{name} {value:.4g}" for name, value in found.items()),
                )

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text sample to the log, metrics.jsonl and TensorBoard."""
        if self._log is not None:
            self._log.append(step=step, text={name: text})
            self._board.text(step, name, text)
            log.info("step %d  %s:\n%s", step, name, printable(text, keep="\n\t"))

    def _show(self, step: int, values: Mapping[str, float | None]) -> None:
        self._board.scalars(step, values)
        for tracker in self._trackers:
            tracker.scalars(step, values)

    def follow(self, config: Config) -> None:
        """Use another number of steps, that of `config`."""
        self._config = config

    def is_due(self, step: int) -> bool:
        """Return whether a training line is due at step number `step`. A skipped step writes a line even if none is due."""
        return self._is_multiple(step, self._config.metrics.log_interval) or self._map_is_due(step)

    def _map_is_due(self, step: int) -> bool:
        """Return whether the load of every expert is written for `step`."""
        interval = self._config.metrics.expert_map_interval
        return self._config.model.moe is not None and interval > 0 and self._is_multiple(step, interval)

    def _is_multiple(self, step: int, interval: int) -> bool:
        return step in (1, self._config.train.steps) or step % interval == 0

    def _write(self, lines: JsonLines, result: StepResult) -> None:
        step, steps, step_time = result.step, self._config.train.steps, self._seconds / self._steps
        fields: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": result.tokens,
            "tokens_per_second": self._tokens / self._seconds,
            "step_time_s": step_time,
            "data_time_s": self._data_s / self._steps,
            "memory_gib": memory_gib(self._device),
        }
        if self._gc_s:
            fields["gc_time_s"] = self._gc_s / self._steps
        if self._mfu_of_rate is not None:
            fields["mfu"] = self._products_s / self._seconds
        if self._config.train.z_loss_coef:
            fields["z_loss"] = result.z_loss
        if (mtp := self._config.model.mtp) is not None:
            others = result.loss + self._config.train.z_loss_coef * result.z_loss
            fields["mtp_loss"] = (result.objective - others) / mtp.loss_coef
        if result.router_layers:
            moe, layers = self._config.model.moe, result.router_layers
            assert moe is not None
            fields |= load_fields(result.routers, layers, moe, counts=self._map_is_due(step))
        if self._published.pop("step", None) == step:
            fields |= self._published
        self._published = {}
        if result.skipped:
            fields["skipped"] = True
        lines.append(**fields)
        self._show(step, dict(_curves(fields)))
        if result.router_layers and self._map_is_due(step):
            counts = [of_layer["counts"] for of_layer in fields["routers"].values()]
            self._board.image(step, "routers/load", expert_map(counts))
        self._report_step(step)
        progress = TrainingLine(fields, steps, self._times.eta(self._steps_left(result)))
        log.info("%s", progress.text(), extra={"progress": progress})

    def _steps_left(self, result: StepResult) -> float:
        """Return the number of remaining steps, counted in steps of the current size."""
        total = self._phases.tokens_after(self._config.train.steps - result.step, result.tokens)
        return max(0, total - result.tokens) / self._phases.at(result.tokens).tokens

    def _restart_means(self) -> None:
        """Reset the sums for the means of the next line."""
        self._steps, self._seconds, self._data_s, self._gc_s = 0, 0.0, 0.0, 0.0
        self._tokens, self._products_s = 0, 0.0  # seconds that the products would take at the peak rate


def mfu_of_rate(
    config: Config, device: torch.device, products: str, world_size: int, flops_per_token: float
) -> float | None:
    """Return the run's MFU at a total rate of one token per second; None if the peak of `products` is unknown."""
    peak = config.metrics.peak_tflops * 1e12 or peak_flops(device, products)
    return flops_per_token / (peak * world_size) if peak else None


def _nested(name: str, found: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield (name, value) of nested numbers, e.g. `monitors/activations/3/rms`. Lists, e.g. expert counts, are left out."""
    for key, value in found.items():
        if isinstance(value, Mapping):
            yield from _nested(f"{name}/{key}", value)
        elif value is None or isinstance(value, int | float):
            yield f"{name}/{key}", value


def history(path: Path) -> Iterator[tuple[int, dict[str, float | None]]]:
    """Yield (step, curve name -> value) of each line in metrics.jsonl."""
    for line in read_lines(path, "step"):
        if curves := dict(_curves(line)):
            yield line["step"], curves


def flat(section: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a configuration, e.g. ("train.steps", 100). before: prefix of the keys."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _curves(fields: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield (curve name, value) for TensorBoard and trackers, from the fields of a line."""
    for name, value in fields.items():
        if name in ("step", "skipped", "text"):
            continue
        if isinstance(value, Mapping):
            yield from _nested(name, value)
        elif value is None or isinstance(value, int | float):
            yield f"train/{name}", value
