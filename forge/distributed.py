"""Which process this is among all: rank, world size, device and launcher, and the process group that joins them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forge import compat
from forge.errors import FAILED, UserError

Result = TypeVar("Result")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """This process among all. `restarts_left` is how often the launcher would start the run again by itself."""

    rank: int
    size: int
    local_rank: int
    launcher: str
    restarts_left: int = 0

    @property
    def device(self) -> torch.device:
        return compat.training_device(self.local_rank)

    @property
    def first_process(self) -> int:
        """On this machine the process that outlives restarts: torchrun's agent, else this one."""
        return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()


def read_world(environment: Mapping[str, str] = os.environ) -> World:
    """What the launcher says in the environment: torchrun's variables, else those of an srun step, else one process.

    Raises UserError for a variable that is missing or no number.
    """

    def number(name: str, default: str = "") -> int:
        text = environment.get(name, default)
        try:
            return int(text)
        except ValueError:
            said = f"= {text} is no whole number" if text else "is missing"
            raise UserError(
                f"{name} {said} in the environment, which others of a launcher are in: start under torchrun or srun, or "
                f"unset RANK, WORLD_SIZE and SLURM_STEP_NUM_TASKS for one process"
            ) from None

    if "RANK" in environment and "WORLD_SIZE" in environment:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environment:
                raise UserError(
                    f"RANK and WORLD_SIZE are in the environment, but {name}, where the ranks meet, is not: start under "
                    f"torchrun or srun, set it, or unset RANK and WORLD_SIZE for one process"
                )
        return World(
            rank=number("RANK"),
            size=number("WORLD_SIZE"),
            local_rank=number("LOCAL_RANK", "0"),
            launcher="torchrun",
            restarts_left=number("TORCHELASTIC_MAX_RESTARTS", "0")
            - number("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    if number("SLURM_STEP_NUM_TASKS", "1") > 1:
        return World(
            rank=number("SLURM_PROCID"),
            size=number("SLURM_STEP_NUM_TASKS"),
            local_rank=number("SLURM_LOCALID"),
            launcher="srun",
        )
    return World(rank=0, size=1, local_rank=0, launcher="python")


def join(world: World, timeout: timedelta = timedelta(minutes=10)) -> None:
    """Make the default process group, of one process too, so that no later code asks whether there is one.

    Raises UserError when there are more processes on this machine than CUDA cards, or under srun when the first
    node cannot be told.
    """
    if world.device.type == "cuda":
        cards = torch.cuda.device_count()
        if world.local_rank >= cards:
            raise UserError(
                f"local rank {world.local_rank} has no CUDA card: this machine has {cards}. "
                f"Start at most {cards} processes per node (torchrun --nproc-per-node {cards})."
            )
        torch.cuda.set_device(world.device)
    backend = compat.communication_backend(world.device)
    # Naming the device binds each NCCL communicator to its card at once, instead of by guess at the first collective.
    bound: dict[str, Any] = {"device_id": world.device} if world.device.type == "cuda" else {}
    if world.launcher == "srun":
        os.environ.setdefault("MASTER_ADDR", _first_slurm_host(os.environ))
        os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000))
    store: dist.Store = dist.HashStore()
    if world.launcher != "python":
        shared, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
        store = _fresh(shared, os.environ)
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout, **bound
    )
    # Gloo fails on a rank whose peer leaves while it still connects, as after an error in the config; nobody leaves alone.
    dist.barrier()


def _fresh(store: dist.Store, environment: Mapping[str, str]) -> dist.Store:
    """`store` without what workers before a restart left in it.

    torchrun lends its workers one store over all its restarts, and PyTorch takes it for a new one each time: a group may
    then be made with the address of a dead worker, and hang. On one node the number of restarts tells the starts apart;
    on several the agents may count differently.
    """
    if environment.get("LOCAL_WORLD_SIZE") != environment.get("WORLD_SIZE"):
        return store
    return dist.PrefixStore(f"start-{environment.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _first_slurm_host(environment: Mapping[str, str]) -> str:
    """The first host of a Slurm node list such as `gpu[003-006,9],login1` (`scontrol show hostnames` without a process)."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    match = re.match(r"(?P<stem>[^,\[]+)(\[(?P<first>\d+)[^\]]*\])?", nodes)
    if match is None:
        raise UserError(
            "srun set no SLURM_STEP_NODELIST; export MASTER_ADDR and MASTER_PORT and start again."
        )
    return match["stem"] + (match["first"] or "")


def on_first_rank(action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0 and give every rank its result, or raise its UserError, or OSError as one, on every rank."""
    outcome: list[Any] = [_attempt(action) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(outcome, src=0)
    result, error = outcome[0]
    if error is not None:
        raise UserError(*error)
    return result


def on_every_rank(action: Callable[[], Result]) -> Result:
    """Run `action` on every rank; if any raises UserError or OSError, all raise the first such rank's, as UserError."""
    result, own_error = _attempt(action)
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, own_error)
    for error in errors:
        if error is not None:
            raise UserError(*error)
    return result


def _attempt(action: Callable[[], Any]) -> tuple[Any, tuple[str, int] | None]:
    """The result of `action`, and what its UserError says, if it raises one; a disk that refuses is told like one."""
    try:
        return action(), None
    except UserError as error:
        return None, (str(error), error.exit_code)
    except OSError as error:
        return None, (str(error), FAILED)


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

    def every(self, what: str, work: Callable[[], Result]) -> list[Result]:
        """Results of `work()` of every rank, in rank order; `RanksFailed` on all when it raised on any."""
        mine = _attempt_any(what, work)
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, mine, group=self.group)
        failures = {rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}
        if failures:
            rank, error = next(iter(failures.items()))
            more = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
            raise RanksFailed(f"{what} failed on rank {rank}: {error}{more}")
        return [result for result, _ in outcomes]

    def first(self, what: str, work: Callable[[], Result]) -> Result:
        """Result of `work()` of rank 0, on every rank; `RanksFailed` on all ranks when it raised."""
        outcome: list[Any] = [_attempt_any(what, work) if self.rank == 0 else None]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, error = outcome[0]
        if error is not None:
            raise RanksFailed(f"{what} failed on rank 0: {error}")
        return result


def describe(error: BaseException) -> str:
    """One line about an exception, fit to be sent to other ranks (exceptions themselves may not unpickle)."""
    return f"{type(error).__name__}: {error}"


def _attempt_any(what: str, work: Callable[[], Result]) -> tuple[Result | None, str | None]:
    try:
        return work(), None
    except Exception as error:
        log.debug("%s failed on this rank", what, exc_info=True)
        return None, describe(error)


@contextmanager
def alone() -> Iterator[Team]:
    """This process as a team of one, in a process group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Team()
    finally:
        dist.destroy_process_group()
