"""Reports about the run as a whole: its phase, status.json, events.jsonl, goodput and memory."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from forge.hook import Hook
from forge.observe.goodput import Ledger, read_past
from forge.observe.hardware import environment
from forge.observe.json_lines import JsonLines, encode, read_object, utc_now
from forge.observe.memory_report import MemoryReport
from forge.observe.run_directory import RunDirectory
from forge.runtime.causes import Cause
from forge.runtime.errors import BAD_CONFIG, NO_CHECKPOINT
from forge.runtime.files import replace_atomically
from forge.runtime.world import World

log = logging.getLogger(__name__)

# Job scripts restart a run whose state is "stopped", unless it is final. scripts/slurm/job.py decides about other states.
State = Literal["running", "stopped", "finished", "failed"]
RunPhase = Literal["set-up", "first step", "data", "step", "evaluation", "save", "end"]


class RunPhases(Hook):
    """The current phase of the run. Listeners limit or measure the time of each phase."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[RunPhase, int], None]] = []
        self._first_step = 0
        self.now: tuple[RunPhase, int] = ("set-up", 0)

    def before_data(self, step: int) -> None:
        self.enter("data", step)

    def after_data(self, step: int) -> None:
        self.enter("step", step)

    def listen(self, listener: Callable[[RunPhase, int], None]) -> None:
        """Call `listener(phase, step)` now and at each change of the phase."""
        self._listeners.append(listener)
        listener(*self.now)

    def enter(self, phase: RunPhase, step: int = 0) -> None:
        """Begin `phase` and end the previous phase.

        The first step of a process, with its wait for data, is the phase "first step". So is each step of `may_compile`.
        """
        if phase in ("data", "step"):
            self._first_step = self._first_step or step
            phase = "first step" if step == self._first_step else phase
        if (phase, step) != self.now:
            self.now = phase, step
            for listener in self._listeners:
                listener(phase, step)

    def renew(self) -> None:
        """Begin the current phase again, so that its time limit counts from now."""
        for listener in self._listeners:
            listener(*self.now)

    def may_compile(self, step: int) -> None:
        """Let `step` take as long as the first step, because it may compile the model again."""
        self._first_step = step

    @contextmanager
    def during(self, phase: RunPhase, step: int) -> Iterator[None]:
        """Enter `phase` for the body, then return to the previous phase."""
        before = self.now
        self.enter(phase, step)
        yield
        self.enter(*before)


class Reporter:
    """Writes the run's reports, on the first rank only.

    began: start of this process on the monotonic clock; None: now. fallback: the entry of `parallel.fallbacks` that was
    applied; "": none.
    """

    def __init__(self, directory: RunDirectory, world: World, began: float | None = None, fallback: str = ""):
        self.directory, self.world, self.step, self._fallback = directory, world, 0, fallback
        self._begun = False
        self._status_failed = False
        self.phases = RunPhases()
        self.memory = MemoryReport(world.device, self.event)
        self._events: JsonLines | None = None
        self._ledger: Ledger | None = None
        self.before: dict[str, Any] = {}
        """On the first rank: status.json of the previous start; empty without one."""
        if world.rank == 0:
            self._events = JsonLines(directory.events)
            past = read_past(directory.events, directory.status)
            self.before = read_object(directory.status)
            step = self.before.get("step")
            self.step = step if isinstance(step, int) else 0
            self._ledger = Ledger(past, time.monotonic() if began is None else began, self.event)
            self.phases.listen(self._ledger.enter)

    def event(self, kind: str, **fields: Any) -> None:
        """Append a line to events.jsonl.

        If `kind` is a `Cause`, it is also the event's `cause`, unless `fields` has a `cause`.
        """
        if self._events is not None:
            cause = {"cause": kind} if isinstance(kind, Cause) else {}
            self._events.append(time=utc_now(), event=kind, **cause | fields)

    def started(self, layout: dict[str, Any], data_parallel: str, restarted: bool) -> None:
        """Report that the ranks are connected and will train with this layout.

        layout: the degree of each axis. data_parallel: `parallel.data_parallel`, which a fallback may have set. restarted:
        True if the launcher has restarted the ranks.
        """
        world, about = self.world, environment(self.world.device)
        self.event(
            "started",
            world_size=world.size,
            launcher=world.launcher,
            launch=world.launch,
            restarted=restarted,
            layout=layout,
            data_parallel=data_parallel,
            environment=about,
        )
        if self._fallback:
            log.info(
                "the configured layout does not fit %d processes; using this entry of parallel.fallbacks: %s",
                world.size,
                self._fallback,
            )
            self.event("layout_fallback", world_size=world.size, override=self._fallback)

    def begun(
        self, step: int, path: Path | None, *, of: int, new: bool, replaced_after: int | None = None
    ) -> None:
        """Report that training starts after step `step` of `of` steps.

        path: the resumed checkpoint, or None. new: False if the run resumes from its own checkpoint. replaced_after: if a
        new history replaces what the directory may hold, the last step of the earlier one that stays, or -1; otherwise
        None. A run that starts again before its first save replaces no history.
        """
        self._begun = True
        kind = "fresh" if path is None else "resumed"
        self.event(kind, step=step, of=of, path=path and str(path), new=new, replaced_after=replaced_after)
        if replaced_after is not None and self._ledger is not None:
            self._ledger.begin_history(step)
        self.running(step)

    def running(self, step: int | None = None) -> None:
        """Write the state `running` to status.json. step: total number of steps made; None: leave it unchanged."""
        self.step = self.step if step is None else step
        self._write_status("running", "", None)

    def ended(
        self,
        state: State,
        reason: str,
        exit_code: int,
        cause: Cause = Cause.ERROR,
        ranks: Sequence[int] = (),
        final: bool = False,
    ) -> None:
        """Report the end of the run.

        cause: the cause of a failure. ranks: the ranks at fault, if known. final: a hook has stopped the run, so job
        scripts do not start it again.
        """
        if self._ledger is not None:
            self._ledger.write()
            if exit_code != BAD_CONFIG:
                log.info("%s", self._ledger.table())
        causes: dict[State, Cause] = {"stopped": Cause.STOPPED, "failed": cause}
        why: dict[str, Any] = {"cause": causes[state]} if state in causes else {}
        why |= {"final": True} if final else {}
        named = {"ranks": list(ranks)} if ranks else {}
        self.event(state, step=self.step, reason=reason, exit_code=exit_code, **why, **named)
        refused = not self._begun and exit_code in (BAD_CONFIG, NO_CHECKPOINT)
        if refused and self.before.get("state") in ("stopped", "finished", "failed"):
            # A refused start does not change the run's state.
            refusal = {"reason": f"the last start was refused: {reason}", "refused": exit_code, **why}
            self._replace_status(self.before | refusal, sync=True)
        else:
            self._write_status(state, reason, exit_code, **why)

    def sync_events(self) -> None:
        """Sync all events so far to disk."""
        if self._events is not None:
            self._events.sync()

    def _write_status(self, state: State, reason: str, exit_code: int | None, **why: Any) -> None:
        status = {
            "state": state,
            "step": self.step,
            "reason": reason,
            **why,
            "exit_code": exit_code,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": utc_now(),
        }
        # No sync while running, because all ranks would wait for the first rank's disk at each line of the metrics.
        self._replace_status(status, sync=state != "running")

    def _replace_status(self, status: dict[str, Any], sync: bool) -> None:
        """Replace status.json, on the first rank. If the disk is full, keep the old file and warn once."""
        if self._events is None:
            return
        try:
            replace_atomically(self.directory.status, encode(status), sync=sync)
            self._status_failed = False
        except OSError as error:
            if not self._status_failed:
                problem = "%s could not be replaced and is out of date: %s"
                log.warning(problem, self.directory.status, error, extra=Cause.NOT_WRITTEN.mark)
            self._status_failed = True
