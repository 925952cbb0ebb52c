"""Trackers: a run's curves at Weights & Biases or MLflow. A failing tracker never ends or delays a run.

A run of forge has one record in each tracking service: the service's own run. `trackers.json` in the run directory
contains the record's id, destination and last step. A resumed run continues the record, and adds missing steps from
metrics.jsonl. With another project, experiment or server, the run gets a new record there with all steps.
The record may contain steps that no longer belong to the run: after a roll-back, after a resume with another learning
rate, other data or another precision, or after a new start in the same directory (`checkpoint.resume = none`, or
another checkpoint). forge then marks the record as superseded, and writes all steps in metrics.jsonl to a new record.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from forge.config.phases import without_microbatches
from forge.observe.json_lines import encode, read_object
from forge.runtime.causes import Cause
from forge.runtime.errors import UserError, redact
from forge.runtime.files import replace_atomically

log = logging.getLogger(__name__)

# Maximum wait in seconds for unsent points at the end of a run.
PATIENCE_S = 30.0
# Keys that decide a run's numbers. Keys not listed, such as the microbatch size, leave them equal up to rounding.
NUMBERS = (
    *("model.", "optimizer.", "schedule.", "precision.", "phase", "run.seed"),
    *("data.temperature", "data.document_mask"),
    *("train.steps", "train.tokens", "train.seq_len", "train.global_batch_size"),
    *("train.grad_clip_norm", "train.z_loss_coef"),
)
# Protects trackers.json: the trackers of a run share it, and each has its own thread.
_saving = threading.Lock()
Curves = tuple[int, Mapping[str, float | None]]


class Service(Protocol):
    """A record: one run in a tracking service (Weights & Biases or MLflow). Methods may raise any exception."""

    destination: list[str]
    """The project or experiment, then the values of the variables that select the server, without secrets."""

    def open(self, record: str | None, name: str, config: Mapping[str, Any]) -> str:
        """Continue the service's run with the id `record`; None: create a run. Return the run's id."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def supersede(self) -> None:
        """Mark the service's run as superseded and close it."""

    def close(self) -> None: ...


class Wandb:
    """A run at Weights & Biases in the project `where`. With WANDB_MODE=offline, the run is written to `folder`."""

    def __init__(self, where: str, folder: Path):
        self._project, self._folder = where, folder
        self.destination = [where, *_environment("WANDB_BASE_URL", "WANDB_ENTITY")]
        self._run: Any = None

    def open(self, record: str | None, name: str, config: Mapping[str, Any]) -> str:
        import wandb

        self._run = wandb.init(
            project=self._project,
            name=name,
            id=record,
            resume=None if record is None else "allow",
            config=dict(config),
            dir=str(self._folder),
            settings=wandb.Settings(console="off", silent=True),
        )
        # Plot against the training step, not the number of calls.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def supersede(self) -> None:
        self._run.tags = (*(self._run.tags or ()), "superseded")
        self.close()

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run at MLflow in the experiment `where`. The server is MLFLOW_TRACKING_URI."""

    def __init__(self, where: str, folder: Path):
        self._experiment = where
        self.destination = [where, *_environment("MLFLOW_TRACKING_URI")]
        if re.fullmatch(r"|sqlite:///[^/].*", self.destination[1]):  # a file in the current folder
            self.destination.append(os.getcwd())
        self._client: Any = None
        self._id = ""

    def open(self, record: str | None, name: str, config: Mapping[str, Any]) -> str:
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient()
        if record is not None:
            self._id = record
            client.update_run(record, status="RUNNING")
            return record
        found = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._id = client.create_run(experiment, run_name=name).info.run_id
        for key, value in config.items():
            client.log_param(self._id, _allowed(key), str(value)[:500])
        return self._id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_allowed(name), value, now, step) for name, value in values.items()]
        for first in range(0, len(metrics), 1000):  # the limit of one request
            self._client.log_batch(self._id, metrics=metrics[first : first + 1000])

    def supersede(self) -> None:
        self._client.set_tag(self._id, "superseded", "true")
        self._client.set_terminated(self._id, "KILLED")

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _environment(*names: str) -> list[str]:
    """Return the values of environment variables without secrets; "" for a variable that is not set."""
    return [redact(os.environ.get(name, "")) for name in names]


def _allowed(name: str) -> str:
    """Return `name` with "_" for each character that MLflow refuses in names, such as the * of a pattern."""
    return re.sub(r"[^\w\-. :/]", "_", name)


SERVICES: dict[str, Callable[[str, Path], Service]] = {"wandb": Wandb, "mlflow": Mlflow}


class Tracker:
    """Writes curves to a `service` in a separate thread. For rank 0 only.

    After a failure the tracker is off, with one warning. kind: the tracker's key in [metrics]. folder: the run
    directory. config: the run's configuration, key -> value. history: returns the curves in metrics.jsonl so far.
    """

    def __init__(
        self,
        kind: str,
        service: Service,
        folder: Path,
        name: str,
        config: Mapping[str, Any],
        history: Callable[[], Iterable[Curves]],
    ):
        self._kind, self._service, self._name, self._config = kind, service, name, config
        self._path, self._history = folder / "trackers.json", history
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open = self._off = False
        self._record: str | None = None
        self._branch = ""
        self._last = self._known = -1

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add a point to each curve in `values`, except for values of None."""
        copied = dict(values)  # the caller may change its own
        self._do(lambda: self._write(step, copied))

    def discard_after(
        self, step: int, history_ends: bool, rollbacks: int = 0, inputs: Mapping[str, Any] | None = None
    ) -> None:
        """Continue the curves from `step`, because the run restarts there.

        history_ends: True if the repeated steps may differ from those sent before. They may also differ if the number
        of `rollbacks`, a key of NUMBERS or a fingerprint of the data in `inputs` has changed since. In these cases, if
        steps after `step` were sent, the service's run is marked as superseded and a new one begins.
        """
        self._do(lambda: self._restart(step, history_ends, rollbacks, inputs))

    def close(self) -> None:
        """Send the remaining points and end the thread. Wait at most PATIENCE_S seconds."""
        if self._thread is not None:
            self._do(self._close)
            self._work.put(None)
            self._thread.join(PATIENCE_S)
            if self._thread.is_alive():
                message = "metrics.%s: points not sent within %g s are lost"
                log.warning(message, self._kind, PATIENCE_S, extra=Cause.SIDE_SYSTEM.mark)
            self._thread = None

    def _do(self, action: Callable[[], None]) -> None:
        if self._off:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._kind, daemon=True)
            self._thread.start()
        self._work.put(action)

    def _run(self) -> None:
        while (action := self._work.get()) is not None:
            if self._off:
                continue
            try:
                action()
            # Any exception of the package or its network. Training continues without the tracker.
            except Exception as error:
                self._off = True
                problem = f"{type(error).__name__}: {error}"
                message = "metrics.%s is off from now on: %s"
                log.warning(message, self._kind, problem, extra=Cause.SIDE_SYSTEM.mark)

    def _restart(
        self, step: int, history_ends: bool, rollbacks: int, inputs: Mapping[str, Any] | None
    ) -> None:
        saved = read_object(self._path).get(self._kind, {})
        record, last = saved.get("record"), int(saved.get("step", -1))
        numbers = {key: value for key, value in self._config.items() if key.startswith(NUMBERS)}
        if phases := numbers.get("phase"):
            numbers["phase"] = without_microbatches(phases)
        # A source is known by its fingerprint and share in `inputs`: its path may differ in every job.
        content = {"rollbacks": rollbacks, "inputs": inputs} | numbers
        branch = hashlib.sha256(encode(content)).hexdigest()
        history_ends |= (saved.get("branch") or self._branch or branch) != branch
        self._branch = branch
        here = self._service.destination
        there = saved.get("destination", here)  # an earlier version of forge saved none
        if record is not None and there != here:
            message = "metrics.%s: a new record begins in %s; the record %s in %s ends at step %d"
            log.info(message, self._kind, " ".join(here), record, " ".join(there), last)
            record = None
        if record is not None and history_ends and last > step:
            self._require_open(record)
            self._service.supersede()
            self._open, record = False, None
        if record is None:
            last = -1
        # Recorded steps are not sent again, because a repeated step gives the same numbers. Points not sent before a
        # kill are sent now.
        self._record, self._last, self._known = record, last, last
        for at, values in self._history():
            if at <= step:
                self._write(at, values)

    def _write(self, step: int, values: Mapping[str, float | None]) -> None:
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        if step <= self._known or not numbers:
            return
        self._require_open(self._record)
        if step > self._last:
            # Saved before the point is sent: if the run is killed in between, a point is missing, but none is
            # duplicated.
            self._last = step
            self._save()
        self._service.log(step, numbers)

    def _require_open(self, record: str | None) -> None:
        if not self._open:
            self._record = self._service.open(record, self._name, self._config)
            self._open = True
            self._save()

    def _save(self) -> None:
        with _saving:
            record = {
                "record": self._record,
                "destination": self._service.destination,
                "step": self._last,
                "branch": self._branch,
            }
            replace_atomically(self._path, encode(read_object(self._path) | {self._kind: record}))

    def _close(self) -> None:
        if self._open:
            self._service.close()
            self._open = False


def require_packages(wanted: Mapping[str, str]) -> None:
    """Raise UserError (exit 2) if the package of a wanted tracker is not installed."""
    for kind, where in wanted.items():
        if where and find_spec(kind) is None:
            raise UserError(
                f"metrics.{kind} = \"{where}\": the package {kind} is not installed; pip install 'forge[{kind}]', or leave "
                "the key empty"
            )


def make_trackers(
    wanted: Mapping[str, str],
    folder: Path,
    name: str,
    config: Mapping[str, Any],
    history: Callable[[], Iterable[Curves]],
) -> list[Tracker]:
    """Return a tracker for each non-empty entry of `wanted`.

    wanted: key of SERVICES -> project (wandb) or experiment (mlflow); "": no tracker.
    """
    return [
        Tracker(kind, SERVICES[kind](where, folder), folder, name, config, history)
        for kind, where in wanted.items()
        if where
    ]
