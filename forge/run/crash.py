"""Report the cause of a failed run: the rank and step at fault, and ranks that died without a report.

When a rank dies, the collectives of all other ranks fail or hang. Each of them sees a lost connection but not the
cause. Every surviving rank therefore answers a roll call in the rendezvous store.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store

from forge.observe.json_lines import utc_now
from forge.observe.report import Reporter, RunPhases
from forge.resilience.watchdog import Alarm
from forge.runtime import compat
from forge.runtime.causes import CAUSES, Cause
from forge.runtime.distributed import cause_of, on_first_rank
from forge.runtime.errors import FAILED, WATCHDOG, UserError

log = logging.getLogger(__name__)

# Time for the other ranks to answer: they hang or fail within about one step, and torchrun kills them 30 s later.
PATIENCE_S = 8.0
# A rank has stalled if it is in the same phase of the same step for this number of calls of `Listener`.
STALLED_CALLS = 5


class CrashReporter:
    """Reports failures on all ranks, for one start (launch) of a run. The constructor is collective, the methods are not."""

    def __init__(self, reporter: Reporter):
        self._reporter, self._world = reporter, reporter.world
        start = on_first_rank("reading the clock", utc_now)

        def roll_call() -> RollCall:
            return RollCall(compat.meeting_store(), self._world.rank, self._world.size, f"roll-call-{start}")

        self._roll_call = roll_call()
        # The watchdog calls `alarm` in its own thread, so `alarm` has its own store connection.
        self.alarm = Listener(roll_call(), reporter.phases) if self._world.size > 1 else None
        self.alarm_s = 1.0 if self._world.size <= 64 else 5.0

    def watchdog_ends(self, alarm: Alarm, step: int) -> None:
        """Report that the watchdog ends this process. alarm: the reason.

        Either a time limit is exceeded, or another rank has raised an alarm.
        """
        expired = alarm.exit_code == WATCHDOG
        # For a lost connection, report after the roll call has identified the rank at fault.
        early = alarm.cause is not Cause.CONNECTION_LOST
        if self._world.rank == 0 and early:
            stacks = f"; stacks of every rank are in {self._reporter.directory.logs}" if expired else ""
            self._reporter.ended("failed", alarm.reason + stacks, *alarm[1:])
        if self._world.size > 1 and expired:
            self._roll_call.raise_alarm(alarm._replace(reason=f"rank {self._world.rank}: {alarm.reason}"))
        # All ranks wait here, because the first exit lets the launcher kill ranks that have not yet written their
        # stacks.
        found = self._find_first(alarm, quiet_s=PATIENCE_S)
        if self._world.rank == 0 and not early:
            self._reporter.ended("failed", *found)
        if self._world.rank == 0 and expired:
            self._reporter.event(Cause.WATCHDOG, step=step, reason=alarm.reason, roll_call=found.reason)

    def failed(self, error: BaseException) -> None:
        """Report that `error` ends the run on this rank. Raise an alarm, which ends the ranks that wait for this rank.

        A UserError raises an alarm too. Most UserErrors occur on all ranks, but after an error on only one rank, e.g.
        exhausted memory, the other ranks would wait.
        """
        rank, cause = self._world.rank, cause_of(error)
        own = Alarm(self._describe(error), FAILED, cause, () if cause is Cause.CONNECTION_LOST else (rank,))
        if isinstance(error, UserError):
            self._reporter.ended("failed", str(error), error.exit_code, cause)
            with contextlib.suppress(Exception):
                self._roll_call.answer(own)
                self._roll_call.raise_alarm(own._replace(reason=str(error), exit_code=error.exit_code))
            return
        log.error("rank %d failed in %s", rank, own.reason, extra=cause.mark)
        found = self._find_first(own, quiet_s=self.alarm_s + 1.0)
        self._reporter.ended("failed", *found)

    def once(self, work: Callable[[], None], patience_s: float) -> None:
        """Call `work` on one rank only, the first to call `once`.

        Other ranks wait until `work` has ended, at most `patience_s` seconds.
        """
        self._roll_call.once(work, patience_s)

    def _find_first(self, own: Alarm, quiet_s: float) -> Alarm:
        """Return the failure to report. It names the first rank to fail, and the ranks that do not answer.

        own: this rank's failure.
        """
        if self._world.size == 1:
            return own
        try:
            first = self._roll_call.answer(own)
            first = first._replace(reason=f"the first to fail was {first.reason}", exit_code=FAILED)
            self._roll_call.raise_alarm(first)
            missing = self._roll_call.missing(PATIENCE_S, quiet_s)
        except Exception as error:
            gone = f"the process with the rendezvous store is gone: {error}"
            found = Alarm(gone, FAILED, Cause.RENDEZVOUS_LOST)
        else:
            found, reason = first, first.reason
            if len(missing) == self._world.size - 1:
                # Dead ranks cannot be distinguished from ranks that have not yet noticed this rank's failure.
                reason += f"; no answer from {_ranks(missing)}: killed, hung, or waiting for this rank"
            elif missing:
                reason = f"no answer from {_ranks(missing)}, killed or hung; {reason}"
            if missing and first.cause is Cause.CONNECTION_LOST:
                found = Alarm(reason, FAILED, Cause.KILLED, tuple(missing))
            else:
                found = first._replace(reason=reason)
        if self._world.rank < 2:  # on two ranks, in case one of them is dead
            log.error("%s", found.reason, extra=found.cause.of(*found.ranks))
        return found

    def _describe(self, error: BaseException) -> str:
        phase, step = self._reporter.phases.now
        name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return f"{phase} of step {step}: {name}{error}" if step else f"{phase}: {name}{error}"


class Listener:
    """Listens for alarms, and for ranks that wait for data. Call repeatedly, in one thread.

    data_waited: monotonic time at which some rank was last known to wait for data; -inf: never.
    """

    def __init__(self, roll_call: RollCall, phases: RunPhases):
        self._roll_call, self._phases = roll_call, phases
        self._before, self._calls = phases.now, 0
        self._waits: int | None = None
        self.data_waited = -math.inf

    def __call__(self) -> Alarm | None:
        """Return the first alarm raised by any rank, if any."""
        now = self._phases.now
        self._calls = self._calls + 1 if now == self._before else 0
        self._before = now
        if self._calls < STALLED_CALLS or now[0] not in ("data", "step"):
            self._waits = None
        else:
            # The number increases as long as a rank waits for data.
            waits = self._roll_call.count_waits(int(now[0] == "data"))
            if self._waits is not None and waits > self._waits:
                self.data_waited = time.monotonic()
            self._waits = waits
        return self._roll_call.alarm()


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _read(written: bytes) -> Alarm:
    reason, exit_code, cause, ranks = json.loads(written)
    return Alarm(reason, exit_code, CAUSES[cause], tuple(ranks))


class RollCall:
    """One rank's side of a roll call after a failure: every rank that still runs writes its own failure to the store.

    Not collective. store: must not be used by another thread. name: unique to this start of the run.
    """

    def __init__(self, store: Store, rank: int, world: int, name: str):
        self._store, self._rank, self._world, self._name = store, rank, world, name

    def answer(self, trouble: Alarm) -> Alarm:
        """Answer the roll call with this rank's failure. Return the failure of the first rank to answer."""
        named = trouble._replace(reason=f"rank {self._rank}: {trouble.reason}")
        first = self._store.compare_set(f"{self._name}/first", "", json.dumps(named))
        self._store.set(f"{self._name}/{self._rank}", "here")
        return _read(first)

    def once(self, work: Callable[[], None], patience_s: float) -> None:
        """Call `work` if this rank is the first to call `once`. Otherwise wait until `work` has ended on the first rank.

        Raises DistStoreError after waiting `patience_s` seconds.
        """
        done, own = f"{self._name}/once", f"rank {self._rank}"
        if self._store.compare_set(f"{done}/by", "", own).decode() != own:
            self._store.wait([done], timedelta(seconds=patience_s))
            return
        try:
            work()
        finally:
            self._store.set(done, "done")

    def raise_alarm(self, alarm: Alarm) -> None:
        """Publish an alarm in the store. Every waiting rank then exits. Only the first alarm counts."""
        self._store.compare_set(f"{self._name}/alarm", "", json.dumps(alarm))

    def alarm(self) -> Alarm | None:
        """Return the first alarm raised by any rank; None if no rank has raised one."""
        key = f"{self._name}/alarm"
        return _read(self._store.get(key)) if self._store.check([key]) else None

    def count_waits(self, new: int) -> int:
        """Add `new` to the number of times that a rank has waited for data, and return the sum over all ranks."""
        return self._store.add(f"{self._name}/waits", new)

    def missing(self, patience_s: float, quiet_s: float = 1.0) -> list[int]:
        """Return the ranks that have not answered.

        Wait until all have answered or until no new answer has come for `quiet_s` seconds, but at most `patience_s`
        seconds.
        """
        missing = [rank for rank in range(self._world) if rank != self._rank]
        now = time.monotonic()
        end, quiet_until = now + patience_s, now + quiet_s
        while missing and time.monotonic() < min(end, quiet_until):
            time.sleep(0.05)
            still = [rank for rank in missing if not self._store.check([f"{self._name}/{rank}"])]
            if len(still) < len(missing):
                missing, quiet_until = still, time.monotonic() + quiet_s
        return missing
