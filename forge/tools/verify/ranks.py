"""Run a function on many ranks: real processes, forked from one warmed server and connected over gloo.

`run_ranks(function, world, *arguments)` calls `function(rank, world, *arguments)` on every rank and returns the results
in rank order. The function must be at module level, and its arguments and result picklable. The fork server has imported
torch but never computed. Forking four ranks from this server takes 0.1 s; starting four interpreters takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import forge

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.checkpoint",
        "torch.utils._sympy.functions",
        "torch._inductor.compile_fx",
        "torch.nn.attention.bias",
        "torch.distributed.pipelining.schedules",
        "pydantic",
        "forge.tools.verify.preload",
    ]
)


# Default timeout: far more than any layout of a small model needs, even on a busy machine.
TIMEOUT_S = 400.0
# Timeout of a verified layout, in seconds per process (at least for two). A small model takes seconds, unless it hangs.
LIMIT_S = 45.0


def limit_s(world: int) -> float:
    """Return the timeout of a layout with `world` processes, in seconds."""
    return LIMIT_S * max(2, world)


class RankFailed(AssertionError):
    """A rank raised or died. The message has the tracebacks of all failed ranks.

    The base class is AssertionError. pytest then reports a failed assertion on a rank as a failed assertion of the test.
    """


def run_ranks(
    function: Callable[..., Any], world: int, *arguments: Any, timeout: float = TIMEOUT_S
) -> list[Any]:
    """Run `function(rank, world, *arguments)` on every rank. Return the results in rank order.

    Raises RankFailed if a rank raises, dies, or takes longer than `timeout` seconds. All ranks are then killed.
    """
    _search_here_first()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes, pipes = [], []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker, args=(sender, function, rank, world, store, arguments), daemon=True
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        results = _collect(processes, pipes, timeout)
    failures = [f"rank {rank}: {text}" for rank, (ok, text) in sorted(results.items()) if not ok]
    if failures:
        raise RankFailed("\n".join(failures))
    return [results[rank][1] for rank in range(world)]


def _search_here_first() -> None:
    """Put this checkout's folder first in PYTHONPATH. Otherwise the fork server might import an installed forge."""
    here = str(Path(forge.__file__).parent.parent)
    before = os.environ.get("PYTHONPATH", "")
    if before.split(os.pathsep)[0] != here:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, before]))


def _collect(processes: list[Any], pipes: list[Any], timeout: float) -> dict[int, tuple[bool, Any]]:
    results: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready: list[Any] = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in waiting.values():
                results[rank] = (False, f"no result within {timeout:.0f} s")
            break
        for pipe in ready:
            rank = waiting[pipe]
            try:
                results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(60)
                results[rank] = (False, f"died with exit code {processes[rank].exitcode}")
        if any(not ok for ok, _ in results.values()):
            # Peers of a failed rank hang in collectives. Wait briefly for other reports, to help explain the failure.
            deadline = min(deadline, time.monotonic() + 5.0)
    failed = any(not ok for ok, _ in results.values())
    for process in processes:
        process.join(0 if failed else 5)
        if process.is_alive():
            process.kill()
            process.join()
    return results


def _worker(
    pipe: Any, function: Callable[..., Any], rank: int, world: int, store: str, arguments: tuple
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world)
    )
    meeting = dist.FileStore(store, world)
    try:
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world)
        outcome = (True, function(rank, world, *arguments))
    except BaseException:
        outcome = (False, traceback.format_exc())
    # Pickle here: the pipe's own pickler passes tensors through shared memory, which disappears with this process.
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    if outcome[0]:
        # Exit together: gloo fails on a rank that is still connecting to a peer when the peer exits. If a peer has
        # failed, this loop never ends, and the parent kills this process.
        meeting.add("done", 1)
        while meeting.add("done", 0) < world:
            time.sleep(0.01)
    # Skip the tear-down of the process group: it is collective, and a failed peer may never arrive.
    os._exit(0 if outcome[0] else 1)
