"""The cost of monitors: extra time of a step with monitors, and mean extra time if every tenth step has monitors.

    python benchmarks/monitors.py                          debug.toml
    python benchmarks/monitors.py --config moe_debug.toml

Two runs alternate in one process. One monitors every step, the other no step. Their losses are equal. On a CPU the script
measures processor time, which other work on the machine does not lengthen. It also counts the operators of a step. Prints
the table and writes it, with date, versions and settings, to benchmarks/results/. Other --section.key=value options
override the config.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.loops import TINY, ForgeLoop, configure, joined, settings_of
from benchmarks.measure import (
    Spread,
    against_bar,
    environment,
    markdown,
    parser,
    publish,
    require_learning,
    take_turns,
)
from forge.runtime.errors import FAILED, UserError
from scripts.options import exit_code_of

# Largest accepted share of monitors in the time of all steps, if every tenth step has monitors.
INTERVAL, BAR = 10, 0.01


class Operators(TorchDispatchMode):
    """A dispatch mode that counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: measure(given, [*(TINY if given.tiny else ()), *overrides]))


def measure(given: argparse.Namespace, overrides: list[str]) -> None:
    """Measure both runs in turns; print and write the table."""
    torch.set_num_threads(given.threads)
    device = joined().device
    plain = configure(given.config, *overrides)
    watched = configure(given.config, *overrides, "--metrics.monitor_interval=1")
    about = environment(device) | {"settings": settings_of(given, plain, device)}
    with tempfile.TemporaryDirectory() as folder:
        loops = [
            ForgeLoop("not monitored", plain, Path(folder) / "plain"),
            ForgeLoop("monitored", watched, Path(folder) / "watched"),
        ]
        seconds = take_turns(
            loops,
            rounds=given.rounds,
            steps=given.steps,
            warmup=given.warmup,
            device=device,
            clock=time.process_time if device.type == "cpu" else time.perf_counter,
        )
        operators = [_operators(loop) for loop in loops]
        losses = [loop.losses() for loop in loops]
        for loop, of_loop in zip(loops, losses, strict=True):
            require_learning(loop.name, of_loop)
            loop.close()
    if losses[0] != losses[1]:
        raise UserError("monitors changed the loss", FAILED)
    base, mine = (seconds[loop.name] for loop in loops)
    more = Spread.of([mine / base - 1 for base, mine in zip(base, mine, strict=True)])
    share = Spread.of([m / INTERVAL for m in (more.low, more.median, more.high)])
    result = {"more": more, "share": share, "operators": operators}
    bar = (
        ""
        if given.tiny
        else against_bar(1 - BAR, Spread.of([1 - share.low, 1 - share.median, 1 - share.high]))
    )
    table = markdown(
        [
            "operators of a step",
            "monitored",
            "a monitored step takes longer by",
            f"at interval {INTERVAL}",
            "bar",
        ],
        [[str(operators[0]), str(operators[1]), more.show(), share.show(4), bar]],
    )
    publish("monitors", given.output, about, result, table)


def _operators(loop: ForgeLoop) -> int:
    with Operators() as counted:
        loop.step()
    return counted.count


def _parser() -> argparse.ArgumentParser:
    return parser(__doc__, config="the model", rounds=12, steps=2, warmup=6, threads=torch.get_num_threads())


if __name__ == "__main__":
    sys.exit(main())
