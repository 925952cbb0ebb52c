"""What a rank says when the run ends against its will: which rank and step, and who did not live to tell."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from forge import compat
from forge.distributed import World, on_first_rank
from forge.errors import FAILED, WATCHDOG, UserError
from forge.observe.events import utc_now
from forge.resilience.roll_call import RollCall
from forge.train.report import Reporter
from forge.train.watch import Phases

log = logging.getLogger(__name__)

# Ranks hang, and fail for each other, within a step of each other; torchrun gives them 30 s before it kills them.
PATIENCE_S = 8.0


class LastWords:
    """For all ranks of one start of a run; to be made by all of them together."""

    def __init__(self, reporter: Reporter, world: World, logs: Path):
        self._reporter, self._world, self._logs = reporter, world, logs
        start = on_first_rank("reading the clock", utc_now)

        def roll_call() -> RollCall:
            return RollCall(compat.meeting_store(), world.rank, world.size, f"roll-call-{start}")

        self._roll_call = roll_call()
        # Asked in a thread of its own.
        self.alarm = roll_call().alarm if world.size > 1 else None

    def of_watchdog(self, reason: str, step: int) -> None:
        """The watchdog ends this process."""
        if self._world.rank == 0:
            self._reporter.ended("failed", f"{reason}; stacks of every rank are in {self._logs}", WATCHDOG)
        if self._world.size > 1:
            self._roll_call.raise_alarm(f"rank {self._world.rank}: {reason}")
        # All ranks wait, so that none is torn down by another's end before it has written its stacks.
        cause = self._call(reason, quiet_s=PATIENCE_S)
        if self._world.rank == 0:
            self._reporter.event("watchdog", step=step, reason=reason, cause=cause)

    def of_user_error(self, error: UserError, phases: Phases) -> None:
        """What the user can mend ends the run: on all ranks alike, or on this one, and then the others name it."""
        self._reporter.ended("failed", str(error), error.exit_code)
        with contextlib.suppress(Exception):
            self._roll_call.answer(_describe(error, phases))

    def of_error(self, error: BaseException, phases: Phases) -> None:
        """`error` ends the run on this rank."""
        trouble = _describe(error, phases)
        log.error("rank %d fails in %s", self._world.rank, trouble)
        cause = self._call(trouble, quiet_s=1.0)
        self._reporter.ended("failed", cause or trouble, FAILED)

    def _call(self, trouble: str, quiet_s: float) -> str:
        """Who did not answer or failed first, as a sentence; empty in a world of one."""
        if self._world.size == 1:
            return ""
        try:
            first = self._roll_call.answer(trouble)
            missing = self._roll_call.missing(PATIENCE_S, quiet_s)
        except Exception as error:
            cause = f"the store through which the ranks met is gone, and with it the process that held it: {error}"
        else:
            cause = f"the first to fail was {first}"
            if len(missing) == self._world.size - 1:
                # Nobody can tell a rank that is gone from one that has not noticed yet that this one has failed.
                cause += f"; no answer from {_ranks(missing)}: killed, hung or waiting for this one"
            elif missing:
                cause = f"no answer from {_ranks(missing)}, killed or hung; {cause}"
        if self._world.rank < 2:  # two, because one of them may be the dead one
            log.error("%s", cause)
        return cause


def _describe(error: BaseException, phases: Phases) -> str:
    phase, step = phases.now
    name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"{phase} of step {step}: {name}{error}" if step else f"{phase}: {name}{error}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
