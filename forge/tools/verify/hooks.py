"""Call the hooks of `train.hooks` in verified steps, and record their effects.

Hooks are called at the same points as in a run. They get a Trainer with the verified model and optimizer, and with a
temporary run directory. The recording has parameters and gradients before and after each call, and the numbers passed
to `trainer.metrics.scalars`. The recording shows which hook call has other effects on a layout than in one process.
"""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge.config import Config, Phases, check_world
from forge.data.build import open_data
from forge.hook import Hook, Hooks, StepResult
from forge.observe.report import Reporter
from forge.observe.run_directory import RunDirectory
from forge.optim import Optimizer
from forge.optim.optimizer import gradient
from forge.parallel.step.model import ParallelModel
from forge.resilience.stopping import StopSignals
from forge.run.hooks import load_hooks
from forge.runtime.distributed import on_first_rank
from forge.runtime.world import World
from forge.shard import Shard
from forge.tools.verify.pieces import TensorKey, TensorPiece, pieces_of, whole
from forge.train.trainer import Trainer

CPU = torch.device("cpu")
# Events with complete gradients, which are recorded. Other events record only parameters.
WITH_GRADIENTS = ("after_gradients", "before_optimizer", "after_optimizer")


@dataclass(frozen=True)
class _OwnDeviceWorld(World):
    """A World on the device `own_device`, not on the device chosen by the launcher."""

    own_device: torch.device = CPU

    @property
    def device(self) -> torch.device:
        return self.own_device


class UserHooks(Hooks):
    """The hooks of a configuration. `UserHooks()` has no hooks, and its methods do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: list[tuple[str, type[Hook]]] = []
        self._seen: dict[TensorKey, list[TensorPiece]] = {}
        self._result: StepResult | None = None
        self._now = ""  # the running hook and its method
        self._shards: list[Shard] = []
        self._trainer: Any = None
        self._folder = ""
        self._saved: dict[str, Any] = {}  # the hooks' state in a checkpoint

    @classmethod
    def of(
        cls,
        config: Config,
        device: torch.device,
        model: ParallelModel | nn.Module,
        optimizer: Optimizer,
        shards: list[Shard],
        folder: str | None,
    ) -> UserHooks:
        """Return the hooks of `config` for `model` and its `shards`. Collective if there are hooks.

        model: a parallel model or a plain module. folder: parent of the temporary run directory; None: the system's folder
        for temporary files.
        """
        hooks = cls()
        if not config.train.hooks:
            return hooks
        hooks._kinds, hooks._shards = load_hooks(config), shards
        rank, size = dist.get_rank(), dist.get_world_size()
        make_folder = functools.partial(tempfile.mkdtemp, prefix="forge-verify-hooks-", dir=folder)
        hooks._folder = on_first_rank("making a folder", make_folder)
        directory = RunDirectory(Path(hooks._folder))
        on_first_rank("making a run directory", directory.acquire)
        world = _OwnDeviceWorld(rank, size, rank, "torchrun", local_size=size, own_device=device)
        degrees, data = check_world(config, size), open_data(config)
        reporter = Reporter(directory, world)
        trainer: Any = Trainer(config, degrees, data, reporter, StopSignals())
        trainer.model = (
            model if isinstance(model, ParallelModel) else _of_module(trainer.model, model, shards)
        )
        trainer.optimizer = optimizer
        trainer.metrics.scalars = hooks._scalars
        hooks._trainer = trainer
        return hooks

    def begin(self, step: int) -> None:
        """Construct the hooks and call `before_run`. step: 0 at the start of a run; otherwise a resume after `step` steps.

        A resume loads the hooks' state from the last `before_save`. Collective if there are hooks.
        """
        if not self._kinds:
            return
        self._result = None
        progress, config = self._trainer.progress, self._trainer.config
        phases = Phases(config)
        progress.step, progress.tokens = step, phases.tokens_after(step)
        progress.last_step_at = phases.tokens_after(step - 1)
        progress.next_sample = progress.order.nth(0, progress.tokens // config.train.seq_len)
        hooks = []
        for path, kind in self._kinds:
            constructor: Any = kind
            hook: Hook = constructor(self._trainer)
            hook.name = path
            hooks.append(hook)
        super().__init__(hooks)
        if step:
            self.load_state(self._saved)
        self.call("before_run", step)

    def call(self, event: str, *arguments: Any) -> None:
        """Call the method `event` of every hook that overrides it, and record the state before and after.

        After `before_save`, also take the hooks' state from rank 0. Collective if there are hooks.
        """
        for hook in self._overriding[event]:
            self._now = f"{hook.name}.{event}"
            self._seen |= self._state("before", event)
            Hooks([hook]).call(event, *arguments)
            self._seen |= self._state("after", event)
        if event == "before_save" and self._hooks:
            state = self.state()
            self._saved = on_first_rank("taking the hooks' state", lambda: state)

    def launched(
        self, step: int, lr: float, sums: Tensor, norm: Tensor, routers: Mapping[str, Tensor]
    ) -> None:
        """Advance the Trainer's progress by one step, and store the step's result for `process_last_result`.

        sums: `Sums.values` (objective, cross-entropy, z-loss, tokens). routers: `layers.N` -> row of the router report.
        """
        if not self._hooks:
            return
        progress = self._trainer.progress
        progress.advance(Phases(self._trainer.config).at(progress.tokens))
        objective, cross_entropy, z_loss, tokens = sums.tolist()
        layers = {name: row for name, row in routers.items() if name.startswith("layers.")}
        self._result = StepResult(
            step=step,
            tokens=progress.tokens,
            lr=lr,
            next_sample=progress.next_sample,
            objective=objective / max(tokens, 1.0),
            loss=cross_entropy / max(tokens, 1.0),
            z_loss=z_loss / max(tokens, 1.0),
            grad_norm=norm.item(),
            valid_tokens=tokens,
            skipped=False,
            waited_s=0.0,
            router_layers=tuple(int(name.partition(".")[2]) for name in layers),
            routers=[number for row in layers.values() for number in row.tolist()],
        )

    def process_last_result(self) -> None:
        """Call the hooks' `after_result` with the result of the last step, unless this was done before."""
        result, self._result = self._result, None
        if result is not None:
            self.call("after_result", result)

    def end(self) -> None:
        """Call the hooks' `after_result` for the last step, then `after_run`."""
        self.process_last_result()
        self.call("after_run")

    def take(self) -> dict[TensorKey, list[TensorPiece]]:
        """Return the tensors recorded since the last call of `take`: kinds `hooked` and `curve`."""
        seen, self._seen = self._seen, {}
        return seen

    def close(self) -> None:
        """Remove the temporary run directory, on rank 0."""
        if self._kinds:
            self._trainer.reporter.directory.release()
            if dist.get_rank() == 0:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _state(self, when: str, event: str) -> dict[TensorKey, list[TensorPiece]]:
        found = {"parameter": [(shard, shard.data) for shard in self._shards]}
        if event in WITH_GRADIENTS:
            found["gradient"] = [(shard, gradient(shard)) for shard in self._shards]
        return {
            ("hooked", f"{self._now} {when} {kind} {name}"): pieces
            for kind, tensors in found.items()
            for (_, name), pieces in pieces_of(kind, tensors).items()
        }

    def _scalars(self, _step: int, values: Mapping[str, float]) -> None:
        if dist.get_rank() == 0:  # only rank 0 writes
            for name, value in values.items():
                number = torch.tensor(float(value), dtype=torch.float64)
                self._seen["curve", f"{self._now} {name}"] = [whole(number)]


def _of_module(one_process: Any, model: nn.Module, shards: list[Shard]) -> ParallelModel:
    """Wrap the plain module `model` as a ParallelModel, for reading and evaluation only.

    one_process: a ParallelModel to copy. The copy's own model and shards are replaced with `model` and `shards`.
    """
    found: Any = copy.copy(one_process)
    found.parts, found.shards, found._engines = [model], shards, ()
    buffers = dict(model.named_buffers())
    found.buffers = [Shard.whole(shard.name, buffers[shard.name]) for shard in one_process.buffers]
    return found
