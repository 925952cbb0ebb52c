"""Work that one rank does for all ranks, and errors that all ranks raise together."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forge.runtime.causes import Cause
from forge.runtime.errors import FAILED, UserError, storage_cause

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class RanksFailed(UserError):
    """Raised on every rank of a group if work failed on any rank. The failed rank's log has the traceback."""

    def __init__(self, message: str, cause: Cause = Cause.ERROR):
        super().__init__(message, FAILED, cause)


def on_first_rank(what: str, work: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Run `work` on the first rank of `group` (None: all ranks) and return its result on every rank.

    Collective. If `work` raises a UserError, every rank raises it. If it raises another exception, every rank raises
    RanksFailed, with `what` in its message. The result must be picklable. Only one thread at a time may use a group.
    """
    outcome: list[Any] = [_attempt(what, work) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(outcome, src=dist.get_process_group_ranks(group)[0], group=group)
    result, failure = outcome[0]
    _raise_first(what, [failure], group)
    return result


def gather_from_ranks(
    what: str, work: Callable[[], Result], group: dist.ProcessGroup | None = None
) -> list[Result]:
    """Run `work` on every rank of `group`. Return the results of all ranks, in rank order, on every rank.

    Collective. If `work` raises on any rank, every rank raises, as in `on_first_rank`.
    """
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, _attempt(what, work), group=group)
    _raise_first(what, [failure for _, failure in outcomes], group)
    return [result for result, _ in outcomes]


def on_every_rank(what: str, work: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Run `work` on every rank of `group` and return this rank's own result, without sending it.

    Collective. If `work` raises on any rank, every rank raises, as in `on_first_rank`.
    """
    own: list[Result] = []
    gather_from_ranks(what, lambda: own.append(work()), group)
    return own[0]


@dataclass(frozen=True)
class RankDifference:
    """The first difference from the values of the first rank: the other rank, the key, and both values."""

    rank: int
    key: str
    first: Any
    other: Any


def find_difference(what: str, values: Mapping[str, Any]) -> RankDifference | None:
    """Compare `values`, JSON by key, over all ranks. Return the first difference, on every rank; None: none. Collective."""
    mine = {key: json.dumps(value, sort_keys=True, default=str) for key, value in values.items()}
    whole = json.dumps(mine, sort_keys=True).encode()
    digests = gather_from_ranks(what, lambda: hashlib.sha256(whole).hexdigest())
    other = next((rank for rank, one in enumerate(digests) if one != digests[0]), None)
    if other is None:
        return None
    # Only two ranks send their values, because a large run has thousands of ranks.
    known = gather_from_ranks(what, lambda: mine if dist.get_rank() in (0, other) else {})
    first, found = known[0], known[other]
    key = next(key for key in sorted(first.keys() | found.keys()) if first.get(key) != found.get(key))
    return RankDifference(other, key, *(json.loads(one.get(key, "null")) for one in (first, found)))


@dataclass(frozen=True)
class _Failure:
    """An exception of a rank in picklable form, because exceptions themselves may not unpickle."""

    message: str
    cause: Cause
    exit_code: int | None = None  # exit code of a UserError; None for any other exception


def _attempt(what: str, work: Callable[[], Result]) -> tuple[Result | None, _Failure | None]:
    try:
        return work(), None
    except UserError as error:
        return None, _Failure(str(error), error.cause, error.exit_code)
    except Exception as error:
        if not isinstance(error, OSError):  # e.g. a full disk: a traceback would not help
            # Only a warning, because the caller decides about the consequences.
            log.warning("%s failed on this rank", what, exc_info=True, extra=Cause.NOTE.mark)
        return None, _Failure(describe(error), cause_of(error))


def _raise_first(what: str, failures: list[_Failure | None], group: dist.ProcessGroup | None) -> None:
    """Raise the failure of the first failed rank, if any."""
    ranks = dist.get_process_group_ranks(group)
    failed = [(rank, one) for rank, one in zip(ranks, failures, strict=False) if one is not None]
    if not failed:
        return
    rank, first = failed[0]
    if first.exit_code is not None:
        raise UserError(first.message, first.exit_code, first.cause)
    more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    raise RanksFailed(f"{what} failed on rank {rank}: {first.message}{more}", first.cause)


def describe(error: BaseException) -> str:
    """Return class and message of an exception as text."""
    return f"{type(error).__name__}: {error}"


# PyTorch's message when host memory is exhausted; there is no exception class for it.
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is an out-of-memory error of the device or of the host, on this rank or another."""
    if isinstance(error, UserError):
        return error.cause is Cause.OUT_OF_MEMORY
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in str(error)


# Gloo and NCCL raise plain RuntimeErrors, recognised by their text.
_BROKEN_CONNECTION = re.compile(r"gloo/transport/|Connection (?:closed|reset) by peer|NCCL")


def cause_of(error: BaseException) -> Cause:
    """Return why a run ended, given the `error` that ended it.

    Parses messages of PyTorch's errors, but never of forge's errors.
    """
    if isinstance(error, UserError):
        return error.cause
    if ran_out_of_memory(error):
        return Cause.OUT_OF_MEMORY
    if isinstance(error, OSError):
        return storage_cause(error)
    broken = isinstance(error, RuntimeError) and _BROKEN_CONNECTION.search(str(error))
    return Cause.CONNECTION_LOST if broken or isinstance(error, dist.DistError) else Cause.ERROR


@contextmanager
def single_process_group() -> Iterator[None]:
    """Make this process the only rank of the default process group within the body."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
