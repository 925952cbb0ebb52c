"""Errors of the user, in contrast to defects of forge.

An error of the user is reported as one sentence and an exit code, without a traceback.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from forge.runtime.causes import Cause

FINISHED = 0
FAILED = 1
BAD_CONFIG = 2
DOES_NOT_FIT = 3
STOPPED = 75
WATCHDOG = 76
NO_CHECKPOINT = 77
USUAL_CAUSES = {
    BAD_CONFIG: Cause.CONFIGURATION,
    WATCHDOG: Cause.WATCHDOG,
    NO_CHECKPOINT: Cause.NO_CHECKPOINT,
}


class UserError(Exception):
    """Ends the program with `message` on rank 0 and `exit_code` on every rank.

    The message names the given value, the allowed values and the next action. Secrets in the message's URLs are
    redacted. cause: if None, derived from the exit code.
    """

    def __init__(self, message: str, exit_code: int = BAD_CONFIG, cause: Cause | None = None):
        super().__init__(redact(message))
        self.exit_code = exit_code
        self.cause = cause or USUAL_CAUSES.get(exit_code, Cause.ERROR)


def unreadable(path: object, error: OSError) -> UserError:
    """Return the error of a file that cannot be read.

    The exit code is 2 if the path or its rights are wrong. It is 1 if the file system failed, so that schedulers start the
    run again.
    """
    message = f"{path}: cannot be read: {error.strerror or error}"
    return UserError(message) if is_wrong_path(error) else UserError(message, FAILED, Cause.IO_ERROR)


def storage_cause(error: OSError) -> Cause:
    """Return the cause of an error of the file system."""
    return Cause.DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else Cause.IO_ERROR


def is_wrong_path(error: OSError) -> bool:
    """Return whether the path or its rights are wrong. Otherwise the file system failed."""
    wrong = FileNotFoundError | FileExistsError | NotADirectoryError | IsADirectoryError | PermissionError
    return isinstance(error, wrong) or error.errno in (errno.EROFS, errno.ENAMETOOLONG)


@contextmanager
def caused_by(cause: Cause) -> Iterator[None]:
    """Set `cause` on a UserError raised in the body, unless the error already has a specific cause."""
    try:
        yield
    except UserError as error:
        if error.cause in (Cause.CONFIGURATION, Cause.ERROR):
            error.cause = cause
        raise


class MissingExtra(UserError):
    """A package of an optional extra (pip install 'forge[...]') is not installed."""


class RollbackRequired(Exception):
    """Raised on all ranks in a step: the run must return to a checkpoint before step `first_bad`.

    pass_over: skip the data of steps `first_bad` to `last_step`. remedy: advice to the user if the roll-back does not
    help.
    """

    def __init__(
        self, reason: str, cause: Cause, *, first_bad: int, last_step: int, pass_over: bool, remedy: str
    ):
        super().__init__(reason)
        self.first_bad, self.last_step, self.pass_over = first_bad, last_step, pass_over
        self.cause, self.remedy = cause, remedy


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most similar to `name`, ignoring case; None if none is similar."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return the end of a message about `name`: '; did you mean "CANDIDATE"?', or "" if no candidate is similar."""
    close = nearest(name, candidates)
    return f'; did you mean "{close}"?' if close else ""


HIDDEN = "REDACTED"
_LOGIN = re.compile(r"://[^/?#\s\"'<>\\]*@")
_SECRET = re.compile(
    r"([?&][^=&?#\s\"'<>\\]*(?:auth|credential|key|passw|pwd|secret|sig|token)[^=&#\s\"'<>\\]*=)[^&#\s\"'<>\\]+",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """Return `text` with the secrets of all URLs replaced with REDACTED.

    Secrets are user and password, and secret query values, e.g. `sig=...`.
    """
    if "://" not in text:
        return text
    return _SECRET.sub(rf"\g<1>{HIDDEN}", _LOGIN.sub(f"://{HIDDEN}@", text))


_SIGNATURE = re.compile(r"[?&][^=&]*sig(?:nature)?=", re.IGNORECASE)


def lasting(url: str) -> str:
    """Return `url` without secrets. A signed URL loses its whole query, because each signature has another one."""
    bare = redact(url)
    return bare.partition("?")[0] if _SIGNATURE.search(bare) else bare


def redact_all(value: Any) -> Any:
    """Return the JSON value with every string redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list | tuple):
        return [redact_all(one) for one in value]
    if isinstance(value, dict):
        return {key: redact_all(one) for key, one in value.items()}
    return value


def is_redacted(url: str) -> bool:
    """Return whether this URL has redacted secrets. Such a URL cannot be opened."""
    return f"://{HIDDEN}@" in url or any(match[0].endswith(f"={HIDDEN}") for match in _SECRET.finditer(url))
