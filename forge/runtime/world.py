"""The rank of the process, from the launcher's environment variables, and its entry into the default process group."""

from __future__ import annotations

import os
import re
import resource
import socket
import threading
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from forge.runtime import compat
from forge.runtime.children import die_with_parent
from forge.runtime.errors import BAD_CONFIG, FAILED, UserError
from forge.runtime.network import POLL_S, choose_gloo_interface, name_start, slurm_meeting_point
from forge.runtime.terminal import stderr

# Enough for sockets to 8,192 ranks in eight groups.
OPEN_FILES = 1 << 16
# Seconds of waiting for other ranks: before the first report, and between later reports.
SILENT_S, SPEAK_AGAIN_S = 10.0, 60.0


@dataclass(frozen=True)
class World:
    """The position of this process among all ranks.

    restarts_left: number of restarts that the launcher still allows. local_size: number of processes on this node; 0:
    unknown. bound: True if Slurm may have bound one GPU to this process.
    """

    rank: int
    size: int
    local_rank: int
    launcher: str
    restarts_left: int = 0
    local_size: int = 0
    bound: bool = False

    @property
    def device(self) -> torch.device:
        has_own_gpu = self.bound and torch.cuda.device_count() == 1
        return compat.training_device(0 if has_own_gpu else self.local_rank)

    @property
    def first_process(self) -> int:
        """Return the id of torchrun's local agent, which survives restarts of the ranks.

        Without an agent, return this process's id.
        """
        return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()

    @property
    def launch(self) -> tuple[str, ...]:
        """Return the identities of the launch: Slurm's job and the elastic run. A restart has one of them. Empty: unknown."""
        return tuple(os.environ[name] for name in ("SLURM_JOB_ID", "FORGE_LAUNCH") if name in os.environ)

    @property
    def restarted(self) -> bool:
        """Return whether this is a restart: an agent restarted this rank, or Slurm requeued the job."""
        counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "FORGE_ROUND")
        return any(os.environ.get(name, "0") != "0" for name in counts)


def read_world(environment: Mapping[str, str] = os.environ) -> World:
    """Read rank and world size from torchrun's environment variables or, without these, from those of an srun step.

    Without a launcher, this process is the only rank. Raises UserError for a missing or non-numeric variable, and for a
    rank not below the world size.
    """

    def number(name: str, default: str = "") -> int:
        text = environment.get(name, default)
        try:
            return int(text)
        except ValueError:
            problem = f"= {text} is not a whole number" if text else "is missing"
            raise UserError(
                f"{name} {problem} in the environment, although other variables of a launcher are set: start under "
                f"torchrun or srun, or unset RANK, WORLD_SIZE and SLURM_STEP_NUM_TASKS for one process"
            ) from None

    given = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    if len(given) == 1:
        other = "WORLD_SIZE" if given == ["RANK"] else "RANK"
        raise UserError(
            f"{given[0]} = {environment[given[0]]} is set in the environment, but {other} is not: start under torchrun or "
            f"srun, set both, or unset {given[0]} for one process"
        )
    if given:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environment:
                raise UserError(
                    f"RANK and WORLD_SIZE are set in the environment, but {name} (part of the rendezvous address) is "
                    f"not: start under torchrun or srun, set {name}, or unset RANK and WORLD_SIZE for one process"
                )
        rank, size = number("RANK"), number("WORLD_SIZE")
        if not 0 <= rank < size:
            raise UserError(
                f"RANK = {rank} and WORLD_SIZE = {size} in the environment: RANK must be at least 0 and below WORLD_SIZE"
            )
        return World(
            rank=rank,
            size=size,
            local_rank=number("LOCAL_RANK", "0"),
            launcher="torchrun",
            restarts_left=number("TORCHELASTIC_MAX_RESTARTS", "0")
            - number("TORCHELASTIC_RESTART_COUNT", "0"),
            local_size=number("LOCAL_WORLD_SIZE", "0"),
        )
    if number("SLURM_STEP_NUM_TASKS", "1") > 1:
        tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
        return World(
            rank=number("SLURM_PROCID"),
            size=number("SLURM_STEP_NUM_TASKS"),
            local_rank=number("SLURM_LOCALID"),
            launcher="srun",
            # E.g. `8(x2),4`: eight tasks on two nodes each, four on a third.
            local_size=max(map(int, re.findall(r"(\d+)(?=\(|,|$)", tasks)), default=0),
            bound="gpu:" in environment.get("SLURMD_TRES_BIND", "").replace("gpu:none", ""),
        )
    return World(rank=0, size=1, local_rank=0, launcher="python")


def join(world: World, timeout: timedelta = timedelta(minutes=10)) -> None:
    """Create the default process group, also for a single process, so later code needs no special case.

    Collective. Raises UserError if this node has more processes than GPUs, if srun does not name the first node, if the
    port is taken, or if not all processes have arrived after `timeout`.
    """
    if world.device.type == "cuda":
        use_expandable_segments(os.environ)
        gpus = torch.cuda.device_count()
        # Checked on every rank of the node, so rank 0, which prints the error, raises too.
        processes = max(world.local_size, world.local_rank + 1)
        if processes > gpus and not (world.bound and gpus == 1):
            raise UserError(
                f"{processes} processes on one node need {processes} GPUs, but each sees {gpus}: start at most {gpus} "
                f"per node (torchrun --nproc-per-node {gpus}), or set CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        torch.cuda.set_device(world.device)
    _raise_file_limit()
    if os.environ.keys() & {"FORGE_NODES", "FORGE_END_WITH_LAUNCHER"}:
        # Otherwise the ranks of a lost elastic agent would continue in the old group, and the ranks of a killed sweep would
        # keep their run's lock.
        die_with_parent()
    backend = compat.communication_backend(world.device)
    # With device_id, NCCL communicators are bound to their GPU now. Otherwise PyTorch guesses the GPU at the first
    # collective.
    bound: dict[str, Any] = {"device_id": world.device} if world.device.type == "cuda" else {}
    if world.launcher == "srun":
        host, port = slurm_meeting_point(os.environ)
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    store: dist.Store = dist.HashStore()
    if world.launcher != "python":
        store = _fresh(_meet(world, timeout), world, timeout, os.environ)
        _wait_for_all(store, world, timeout)
        if world.local_size != world.size:
            choose_gloo_interface(store, world.rank, world.size, os.environ["MASTER_ADDR"])
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout, **bound
    )
    # Wait until all ranks are connected: Gloo raises on a rank whose peer exits while connecting, e.g. after a config
    # error.
    dist.barrier()


def _meet(world: World, timeout: timedelta) -> dist.Store:
    """Connect to the store at MASTER_ADDR and MASTER_PORT. Rank 0 opens the store, unless torchrun has opened it."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    opens = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    silence = threading.Timer(
        SILENT_S, lambda: stderr.write(f"forge: rank {world.rank} waits for rank 0, at {host}:{port}\n")
    )
    silence.daemon = True
    if world.local_rank == 0:
        silence.start()
    try:
        # The store's own wait for other ranks would print nothing; `_wait_for_all` prints.
        return dist.TCPStore(
            host, int(port), is_master=opens, wait_for_workers=False, multi_tenant=opens, timeout=timeout
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        # An elastic agent has chosen the port, and chooses another at its next attempt.
        code = FAILED if "FORGE_ROUND" in os.environ else BAD_CONFIG
        raise UserError(
            f"port {port} is in use on {socket.gethostname()}; export another MASTER_PORT.", code
        ) from None
    finally:
        silence.cancel()


def _wait_for_all(store: dist.Store, world: World, timeout: timedelta) -> None:
    """Wait on rank 0 until all processes have connected.

    Other ranks return at once. During a long wait, rank 0 reports the number of connected processes. Raises UserError
    after `timeout`.
    """
    arrived = store.add("arrived", 1)
    began = time.monotonic()
    speak_s = SILENT_S
    while world.rank == 0 and arrived < world.size:
        waited_s = time.monotonic() - began
        text = f"{arrived} of {world.size} processes have arrived at port {os.environ['MASTER_PORT']}"
        if waited_s >= timeout.total_seconds():
            raise UserError(
                f"only {text} within {timeout.total_seconds():.0f} s: start the missing processes, or look at their logs",
                FAILED,
            )
        if waited_s >= speak_s:
            stderr.write(f"forge: {text} after {waited_s:.0f} s\n")
            speak_s += SPEAK_AGAIN_S
        time.sleep(POLL_S)
        arrived = store.add("arrived", 0)


def use_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Make PyTorch's CUDA allocator use expandable segments, unless the user has configured it.

    Call before CUDA allocates. In fixed segments, batches and gathered weights of different sizes leave gaps too small
    for later tensors. Source: https://docs.pytorch.org/docs/stable/notes/cuda.html (PYTORCH_ALLOC_CONF; before PyTorch
    2.9 PYTORCH_CUDA_ALLOC_CONF).
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _raise_file_limit() -> None:
    """Raise the limit of open files, often 1,024, to OPEN_FILES or the system's maximum.

    Gloo connects every pair of ranks in a group: a rank in four groups of 1,024 ranks has 4,092 sockets.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _fresh(store: dist.Store, world: World, timeout: timedelta, environment: Mapping[str, str]) -> dist.Store:
    """Return a view of `store` without the keys written before a restart.

    torchrun keeps one store over all restarts, but PyTorch assumes a new store each time: a group could connect to the
    address of a dead worker and hang. The view adds a new prefix at each start (launch). On one node, the prefix is the
    number of restarts. On several nodes, the ranks agree on a prefix (`name_start`): the agents' numbers of restarts may
    differ, because an agent does not count a change of nodes as a restart.
    """
    if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
        return dist.PrefixStore(f"start-{environment.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.PrefixStore(f"start-{name_start(store, world.rank, world.size, timeout)}", store)
    return store
