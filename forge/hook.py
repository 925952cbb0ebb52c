"""`Hook`: the extension point of the training loop, for forge's own hooks (forge/run/hooks.py) and for yours.

`train.hooks = ["package.module:Class"]` adds hooks to a run. Each class must be a subclass of `Hook`. Every rank
constructs the class with one argument, the `Trainer` (forge/train/trainer.py), once data, model, optimizer and state
are ready. The constructor may raise `UserError` to refuse the run, and must write no file, because the run directory may
still hold an earlier history. Nor must it call a collective, because ranks would wait for a rank whose hooks cannot be
made. Each method below is called at one point of the run. Within a step the order is:

    before_step  before_data  after_data  before_gradients  after_gradients  before_optimizer  after_optimizer  after_step

`after_result` comes later, because the device computes step n while the host launches step n + 1. `after_result` of step n
is called during step n + 1, between the launch of its gradients and its update. If an evaluation, a save or a phase with
other sizes waits for the result, the call is earlier.

A hook may:

- Read everything in the trainer. A hook that changes gradients or parameters is responsible for the effect. After
  writing to `shard.data` of trainer.model.shards, the hook calls trainer.model.after_update() on every rank. Otherwise
  the model may compute with the old values.
- Use collectives, on all ranks in the same order. So decide by values equal on all ranks: the step, the config, a
  `StepResult`.
- Write files, on the first rank only (`trainer.reporter.world.rank == 0`). `trainer.metrics.scalars` checks the rank
  itself.
- Request the end of the run, on any rank: `trainer.request_stop(reason)`. All ranks make at most two more steps, save, and
  stop. Job scripts do not start the run again, unless `final=False`.
- Raise an exception: the run fails, and the message names the hook.

A hook should not synchronise with the device in a step (`tensor.item()`, `print(tensor)`), because this delays the
launch of further work.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from forge.runtime.causes import Cause
from forge.runtime.errors import RollbackRequired, UserError

log = logging.getLogger(__name__)
NOTE = Cause.NOTE.mark


@dataclass(frozen=True)
class StepInfo:
    """Facts about a step that the host knows at launch.

    tokens: number of token positions trained up to and including this step. next_sample: the first global sample after
    the step.
    """

    step: int
    tokens: int
    lr: float
    next_sample: int


@dataclass(frozen=True)
class StepResult(StepInfo):
    """The numbers of a step, computed by the device; equal on all ranks.

    loss, z_loss, objective: means over the `valid_tokens` of the global batch. grad_norm: before clipping. skipped: True if
    the step changed nothing; its loss and norm are then arbitrary. waited_s: seconds that the host waited for the result.
    routers: the rows of a RouterReport (forge/parallel/step/routers.py), one for each of `router_layers`; empty in steps
    without router statistics.
    """

    loss: float
    z_loss: float
    objective: float
    grad_norm: float
    valid_tokens: float
    skipped: bool
    waited_s: float
    router_layers: tuple[int, ...]
    routers: list[float]


class Hook:
    """A hook that does nothing. Override the methods you need; the others cost nothing."""

    name = ""
    """The import path of a hook from the config; empty for forge's own hooks."""

    def before_run(self, step: int) -> None:
        """At the start of the run. Everything is built, and `step` steps are done (0: the run begins)."""

    def after_rollback(self, step: int) -> None:
        """After the run has rolled back to the state after `step`.

        Discard your results of later steps: the run repeats these steps.
        """

    def after_run(self) -> None:
        """At the end of the run, even after an error.

        Called if `before_run` has returned. Hooks are called in reverse order.
        """

    def before_step(self, step: int) -> None:
        """Before step `step`, counted from 1."""

    def before_data(self, step: int) -> None:
        """Before the batch is read."""

    def after_data(self, step: int) -> None:
        """After the batch has been sent to the device. The copy may still be running."""

    def before_gradients(self, step: int) -> None:
        """Before the gradients are computed."""

    def after_gradients(self, step: int) -> None:
        """After the gradients of the global batch are complete in `trainer.model.shards`, before they are clipped."""

    def before_optimizer(self, step: int) -> None:
        """Before the parameters are updated.

        Gradients are already clipped, except with `compile.optimizer`: the update then clips them.
        """

    def after_optimizer(self, step: int) -> None:
        """After the optimizer has updated its shards of the parameters."""

    def after_step(self, step: int) -> None:
        """After the step has been launched; on a GPU the step may still be running."""

    def after_result(self, result: StepResult) -> None:
        """After the device has finished step `result.step`."""

    def after_evaluation(self, step: int, losses: Mapping[str, float]) -> None:
        """After an evaluation of the state after `step`. losses: held-out loss by name, equal on all ranks."""

    def before_save(self, step: int) -> None:
        """Before a checkpoint of `step` is made. Flush your files, because a killed run resumes at this step."""

    def after_save(self, step: int) -> None:
        """After the checkpoint of `step` is complete and on disk. Training may already have made later steps.

        With `checkpoint.mode = "async"`, ranks call it after different steps, so it must not call collectives.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return this hook's state for the checkpoint, as a dict that JSON can encode.

        Called on all ranks after `before_save`, only for hooks of `train.hooks`. Only the first rank's dict is saved, so all
        ranks should return equal dicts.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`.

        Called on all ranks before `before_run` of a resumed run and before `after_rollback`. The layout may have
        changed. Not called if the checkpoint has no state of this hook.
        """


EVENTS = tuple(name for name in vars(Hook) if name.startswith(("before_", "after_")))


class Hooks:
    """Calls a list of hooks in order."""

    def __init__(self, hooks: Sequence[Hook] = ()):
        self._hooks = list(hooks)
        self._overriding = {
            event: [hook for hook in hooks if getattr(type(hook), event) is not getattr(Hook, event)]
            for event in EVENTS
        }

    def call(self, event: str, *arguments: Any) -> None:
        """Call the method `event` of every hook that overrides it."""
        for hook in self._overriding[event]:
            _call(hook, event, *arguments)

    def state(self) -> dict[str, Any]:
        """Return hook name -> state, for hooks that override `state_dict`. Raises RuntimeError if a state is not JSON."""
        found = {}
        for name, hook in self._with_state():
            found[name] = _call(hook, "state_dict")
            try:
                json.dumps(found[name], allow_nan=False)
            except (TypeError, ValueError) as error:
                raise RuntimeError(
                    f"hook {hook.name}: state_dict returned a value that is not JSON: {error}"
                ) from None
        return found

    def load_state(self, saved: Mapping[str, Any], rolls_back: bool = False) -> None:
        """Restore each hook from its entry in `saved`, a result of `state`. Log missing entries and unused entries.

        rolls_back: the hooks have seen steps that the run has abandoned.
        """
        names = dict(self._with_state())
        effect = "keeps its present state" if rolls_back else "starts from its initial state"
        for name, hook in names.items():
            if name in saved:
                _call(hook, "load_state_dict", saved[name])
            else:
                log.warning(
                    "the checkpoint has no state of hook %s: the hook %s",
                    name,
                    effect,
                    extra=NOTE,
                )
        for name in sorted(saved.keys() - names.keys()):
            log.warning(
                "the checkpoint's state of hook %s is ignored: train.hooks does not list the hook",
                name,
                extra=NOTE,
            )

    def _with_state(self) -> Iterator[tuple[str, Hook]]:
        """Yield (name, hook) for each hook of `train.hooks` that overrides `state_dict`.

        The name is the import path. The second hook with the same path is named `PATH (2)`.
        """
        seen: Counter[str] = Counter()
        for hook in self._hooks:
            if hook.name and type(hook).state_dict is not Hook.state_dict:
                seen[hook.name] += 1
                number = seen[hook.name]
                yield (hook.name if number == 1 else f"{hook.name} ({number})"), hook

    @contextmanager
    def around(self, phase: str, step: int) -> Iterator[None]:
        """Call `before_PHASE` before the body and `after_PHASE` after it."""
        self.call(f"before_{phase}", step)
        yield
        self.call(f"after_{phase}", step)

    @contextmanager
    def around_run(self, step: int) -> Iterator[None]:
        """Call `before_run` before the body and `after_run` after it, even after an exception."""
        with ExitStack() as stack:
            for hook in self._hooks:
                _call(hook, "before_run", step)
                stack.callback(_call, hook, "after_run")
            yield


def _call(hook: Hook, event: str, *arguments: Any) -> Any:
    try:
        return getattr(hook, event)(*arguments)
    except RollbackRequired:
        raise
    except Exception as error:
        if not hook.name:
            raise
        if isinstance(error, UserError):
            raise UserError(f"{hook.name}.{event}: {error}", error.exit_code, error.cause) from error
        raise RuntimeError(f"hook {hook.name} failed in {event}: {type(error).__name__}: {error}") from error
