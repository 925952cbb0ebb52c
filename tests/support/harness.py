"""Start ranks and control them from the test, e.g. with signals.

If a test only needs the results of a function, use `run_ranks` (forge/tools/verify/ranks.py).
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from forge.tools.verify.ranks import TIMEOUT_S, RankFailed, context, run_ranks

__all__ = ["RankFailed", "Started", "end_ranks", "may_start_processes", "run_ranks", "start_ranks"]


class Started:
    """Running ranks under the test's control. port: a bound socket, kept open until the ranks end."""

    def __init__(self, processes: list[Any]):
        self.processes = processes
        self.port: Any = None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def join(self, timeout: float = TIMEOUT_S) -> list[int]:
        """Return exit codes in rank order, -N after signal N. Raises RankFailed if a rank still runs after `timeout` s."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        running = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for process in self.processes:
            process.kill()
        if running:
            raise RankFailed(f"ranks {running} still ran after {timeout:.0f} s")
        return [process.exitcode for process in self.processes]


def start_ranks(function: Callable[..., Any], world: int, *arguments: Any) -> Started:
    """Start `function(rank, world, *arguments)` on every rank, without a process group."""
    processes = [
        context.Process(target=function, args=(rank, world, *arguments), daemon=True) for rank in range(world)
    ]
    for process in processes:
        process.start()
    started = Started(processes)
    _running.append(started)
    return started


_running: list[Started] = []


def end_ranks() -> None:
    """Kill the leftover ranks of a failed test, because they hold ports, locks and cores. Wait for their ends."""
    left = [process for started in _running for process in started.processes if process.is_alive()]
    for process in left:
        process.kill()
    for process in left:
        process.join()
    _running.clear()


def may_start_processes() -> None:
    """Allow this rank to start its own ranks, like a real script. They die with this rank: see `run_ranks`."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
