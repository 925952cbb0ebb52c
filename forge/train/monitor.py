"""The hook for step monitors: `metrics.monitor_interval`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from forge.config import Config
from forge.config.model import ModelConfig
from forge.hook import Hook, StepResult
from forge.observe.monitors import Monitors, is_monitored
from forge.observe.router_load import load_fields
from forge.parallel.build import build_meta_model
from forge.parallel.mesh import Meshes
from forge.parallel.step.model import ParallelModel
from forge.train.results import DelayedRead
from forge.train.trainer import Trainer

LOADS = ("load_max", "load_min", "load_entropy")


def make_monitors(config: Config, model: ParallelModel, meshes: Meshes, device: torch.device) -> Monitors:
    """Return the monitors of `metrics.monitors` for the model of `config`."""
    tp, whole = meshes.tp, build_meta_model(config)
    return Monitors(
        config.metrics.monitors,
        model.parts,
        [name for name, _ in whole.named_parameters()],
        n_layers=len(whole.layers),
        units=most_units(config.model),
        world=(dist.get_rank(), dist.get_world_size()),
        tp=(tp.get_local_rank(), tp.size()),
        compiled=config.compile.enabled,
        device=device,
    )


def most_units(config: ModelConfig) -> int:
    """Return the largest hidden size of any dense or shared-expert feed-forward in the model."""
    shared = config.moe.n_shared_experts * config.moe.expert_dim if config.moe is not None else 0
    return max(config.ffn_dim, shared)


class StepMonitors(Hook):
    """Writes the monitors of a step once its result is known. Between monitored steps, no monitor is hooked to the model."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._monitors = make_monitors(trainer.config, trainer.model, trainer.meshes, trainer.device)
        self._delayed = DelayedRead(trainer.device)
        self._active = False

    def before_gradients(self, step: int) -> None:
        self._active = self._is_due(step)
        if self._active:
            self._monitors.begin()

    def after_gradients(self, step: int) -> None:
        self._monitors.remove()
        if self._active:
            self._monitors.count_gradients(self._trainer.model.shards)

    def before_optimizer(self, step: int) -> None:
        if self._active:
            self._monitors.before_update(self._trainer.model.shards)

    def after_optimizer(self, step: int) -> None:
        if self._active:
            self._monitors.after_update(self._trainer.model.shards)
            self._delayed.push(step, self._monitors.reduce())

    def after_result(self, result: StepResult) -> None:
        if result.skipped:
            # A diagnosis may recompute the skipped step and then the current step. Stop monitoring the current step,
            # because its numbers would include both.
            self._monitors.remove()
            self._active = False
        ready = self._delayed.pop(flush=True) if self._is_due(result.step) else None
        if ready is None:
            return
        assert ready[0] == result.step
        found = self._monitors.read(ready[1])
        moe = self._trainer.config.model.moe
        if result.router_layers and moe is not None and "experts" in found:
            fields = load_fields(result.routers, result.router_layers, moe)["routers"]
            for layer, of_layer in found["experts"].items():
                of_layer |= {name: fields[layer][name] for name in LOADS}
        self._trainer.metrics.monitors(result.step, found)

    def after_rollback(self, step: int) -> None:
        self._monitors.remove()
        self._delayed = DelayedRead(self._trainer.device)

    def after_run(self) -> None:
        self._monitors.remove()

    def _is_due(self, step: int) -> bool:
        return is_monitored(self._trainer.config.metrics, step)
