"""Deciding together: work that any rank may fail at, after which all ranks know whether all succeeded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
logger = logging.getLogger(__name__)


class RanksFailed(RuntimeError):
    """Raised on every rank alike when some rank failed at a piece of common work."""


@dataclass(frozen=True)
class Team:
    """The ranks of `group` (None: all, over the default group). One thread at a time may use a group."""

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def every(self, what: str, work: Callable[[], T]) -> list[T]:
        """Results of `work()` of every rank, in rank order; `RanksFailed` on all when it raised on any."""
        mine = _attempt(what, work)
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, mine, group=self.group)
        failures = {rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}
        if failures:
            rank, error = next(iter(failures.items()))
            more = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
            raise RanksFailed(f"{what} failed on rank {rank}: {error}{more}")
        return [result for result, _ in outcomes]

    def first(self, what: str, work: Callable[[], T]) -> T:
        """Result of `work()` of rank 0, on every rank; `RanksFailed` on all ranks when it raised."""
        outcome: list[Any] = [_attempt(what, work) if self.rank == 0 else None]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, error = outcome[0]
        if error is not None:
            raise RanksFailed(f"{what} failed on rank 0: {error}")
        return result


def describe(error: BaseException) -> str:
    """One line about an exception, fit to be sent to other ranks (exceptions themselves may not unpickle)."""
    return f"{type(error).__name__}: {error}"


def _attempt(what: str, work: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return work(), None
    except Exception as error:
        logger.debug("%s failed on this rank", what, exc_info=True)
        return None, describe(error)
