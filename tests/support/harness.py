"""Ranks that run while a test does something to them. `run_ranks` (forge/tools/verify/ranks.py) suffices where a test needs
a function's results alone.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from forge.tools.verify.ranks import TIMEOUT_S, RankFailed, context, run_ranks

__all__ = ["RankFailed", "Started", "end_ranks", "may_start_processes", "run_ranks", "start_ranks"]


class Started:
    """Ranks that run while the test does something to them. `port` is a socket to keep until they end."""

    def __init__(self, processes: list[Any]):
        self.processes = processes
        self.port: Any = None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def join(self, timeout: float = TIMEOUT_S) -> list[int]:
        """Exit codes in rank order (minus the signal's number for a killed one); RankFailed if any still runs."""
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
    """Kill the ranks that a failed test left running, and wait until they are gone: they hold ports, locks and cores."""
    left = [process for started in _running for process in started.processes if process.is_alive()]
    for process in left:
        process.kill()
    for process in left:
        process.join()
    _running.clear()


def may_start_processes() -> None:
    """Let this rank start ranks of its own, as the script that it stands for does. They end with it: see `run_ranks`."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
