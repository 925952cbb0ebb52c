"""Errors of the user, as opposed to defects of forge: one sentence and an exit code, without a traceback."""

import difflib
from collections.abc import Iterable

from forge.runtime.redact import redact

FINISHED = 0
FAILED = 1
BAD_CONFIG = 2
DOES_NOT_FIT = 3
STOPPED = 75
WATCHDOG = 76
NO_CHECKPOINT = 77


class UserError(Exception):
    """Ends the program with `message` on rank 0 and `exit_code` on every rank.

    The message names what was given, what is allowed and what to do. Secrets of URLs in it are redacted.
    """

    def __init__(self, message: str, exit_code: int = BAD_CONFIG):
        super().__init__(redact(message))
        self.exit_code = exit_code


class MissingExtra(UserError):
    """A package of an optional extra is not installed."""


class RollbackRequired(Exception):
    """Raised on all ranks in a step: the run has to return to a checkpoint from before step `first_bad`.

    pass_over: leave out the data from there to the end of `last_step`. remedy: what to do if returning does not help.
    """

    def __init__(self, reason: str, *, first_bad: int, last_step: int, pass_over: bool, remedy: str):
        super().__init__(reason)
        self.first_bad, self.last_step, self.pass_over = first_bad, last_step, pass_over
        self.remedy = remedy


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most similar to `name`, ignoring case; None if none is similar."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return the end of a message about `name`: the most similar candidate, if any."""
    close = nearest(name, candidates)
    return f'; did you mean "{close}"?' if close else ""
