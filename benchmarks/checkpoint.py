"""Training time lost to a checkpoint, synchronous and asynchronous, and the time of a resume.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --config 160m.toml --folder /mnt/disk

Two measurements alternate. One has plain steps. The other has a save, followed by steps until the checkpoint is on disk.
`beyond the wait` is the cost of background writing: the extra time of the steps during a save, compared with the plain
steps before and after. It excludes the call of save(). If training leaves a core free, as on a GPU host, this cost is
small. To see this on two cores, set OMP_NUM_THREADS=1. A resume verifies every checksum and loads the checkpoint. The
table compares the time of a resume with the time of a bare read of the same files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.data import forget
from benchmarks.loops import TINY, ForgeLoop, configure, joined
from benchmarks.measure import (
    Spread,
    environment,
    markdown,
    parser,
    publish,
    require_learning,
    synchronize,
    timed,
)
from forge.runtime.errors import FAILED, UserError
from forge.train.state import all_tensors
from scripts.options import exit_code_of, positive


@dataclass(frozen=True)
class Save:
    """Times of one save and of the steps during the save.

    blocked: seconds spent in save(). until_on_disk: seconds until the checkpoint was on disk. steps: number of training
    steps made while the checkpoint was written. stepping: seconds of these steps.
    """

    blocked: float
    until_on_disk: float
    stepping: float
    steps: int


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: measure(given, [*(TINY if given.tiny else ()), *overrides]))


def measure(given: argparse.Namespace, overrides: list[str]) -> None:
    """Measure saves in both modes, and resumes; print and write the table."""
    device = joined().device
    config = configure(given.config, *overrides)
    about = environment(device) | {"settings": _settings(given, device)}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for mode in ("sync", "async"):
            loop = ForgeLoop(mode, config, Path(folder) / mode, mode=mode)
            _mean_step(loop, given.steps, device)  # warms up
            _with_save(loop, device)
            plain, saves = [_mean_step(loop, given.steps, device)], []
            for _ in range(given.rounds):
                saves.append(_with_save(loop, device))
                plain.append(_mean_step(loop, given.steps, device))
            require_learning(mode, loop.losses())
            # Compare with the plain steps before and after, so that slow and fast phases of the machine cancel.
            usual = [(before + after) / 2 for before, after in pairwise(plain)]
            step = Spread.of(plain)
            beyond = [save.stepping - save.steps * step_s for save, step_s in zip(saves, usual, strict=True)]
            results[mode] = {
                "step_s": step,
                "blocked_s": Spread.of([save.blocked for save in saves]),
                "on_disk_s": Spread.of([save.until_on_disk for save in saves]),
                "beyond_s": Spread.of(beyond),
                "beyond_percent_of_a_step": Spread.of([100 * seconds / step.median for seconds in beyond]),
            }
            if mode == "async":
                results["resume"] = _resume(loop, given.rounds)
            loop.close()
    table = _table(results)
    publish("checkpoint", given.output, about, results, table)


def _mean_step(loop: ForgeLoop, steps: int, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        loop.step()
    synchronize(device)
    return (time.perf_counter() - began) / steps


def _with_save(loop: ForgeLoop, device: torch.device) -> Save:
    """Time a save, and the steps until the save has ended. At least one step is made."""
    checkpoints, step = loop.checkpoints, loop.trainer.progress.step
    _, blocked = timed(loop.saves.save)
    steps, outcomes = 0, []
    began = time.perf_counter()
    while steps == 0 or not (outcomes or checkpoints.path(step).exists()):
        loop.step()
        steps += 1
        outcomes = checkpoints.poll()  # empty if save() waited for the checkpoint
    synchronize(device)
    stepping = time.perf_counter() - began
    outcomes = outcomes or checkpoints.wait()
    problem = outcomes[-1].error if outcomes else None
    if problem or not checkpoints.path(step).exists():
        raise UserError(f"the checkpoint of step {step} was not written: {problem}", exit_code=FAILED)
    return Save(blocked, outcomes[-1].seconds if outcomes else blocked, stepping, steps)


def _resume(loop: ForgeLoop, rounds: int) -> dict[str, Any]:
    """Time resumes from the newest checkpoint, and bare reads of its files. Both alternate, with a cold page cache."""
    checkpoints = loop.checkpoints
    step = checkpoints.latest(verify=False)
    assert step is not None
    path = checkpoints.path(step)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    folders = [path, *(folder for folder in path.rglob("*") if folder.is_dir())]
    tensors = all_tensors(loop.trainer.model, loop.trainer.optimizer)
    seconds: dict[str, list[float]] = {"verify": [], "load": [], "plain read": []}
    for _ in range(rounds):
        _forget_all(folders)
        problem, verify_s = timed(lambda: checkpoints.verify(path))
        if problem is not None:
            raise UserError(problem, exit_code=FAILED)
        _, load_s = timed(lambda: checkpoints.load(path, tensors))
        _forget_all(folders)
        _, read_s = timed(lambda: _read_all(path))
        for name, value in (("verify", verify_s), ("load", load_s), ("plain read", read_s)):
            seconds[name].append(value)
    both = [a + b for a, b in zip(seconds["verify"], seconds["load"], strict=True)]
    return {
        "megabytes": size / 1e6,
        "verify_s": Spread.of(seconds["verify"]),
        "load_s": Spread.of(seconds["load"]),
        "plain_read_s": Spread.of(seconds["plain read"]),
        "megabytes_per_second": Spread.of([size / 1e6 / value for value in both]),
        "plain_megabytes_per_second": Spread.of([size / 1e6 / value for value in seconds["plain read"]]),
    }


def _forget_all(folders: list[Path]) -> None:
    for folder in folders:
        forget(folder)


def _read_all(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            with open(file, "rb", buffering=0) as content:
                while content.read(1 << 24):
                    pass


def _table(results: dict[str, Any]) -> str:
    resume = results["resume"]
    saves = [
        [
            mode,
            results[mode]["step_s"].show(),
            results[mode]["blocked_s"].show(),
            results[mode]["on_disk_s"].show(),
            results[mode]["beyond_s"].show(),
            results[mode]["beyond_percent_of_a_step"].show(1),
        ]
        for mode in ("sync", "async")
    ]
    resumes = [
        [
            "verify and load",
            f"{resume['verify_s'].show()} + {resume['load_s'].show()}",
            resume["megabytes_per_second"].show(0),
        ],
        ["plain read", resume["plain_read_s"].show(), resume["plain_megabytes_per_second"].show(0)],
    ]
    return "\n\n".join(
        [
            markdown(
                ["save", "step s", "save() blocks s", "on disk after s", "beyond the wait s", "% of a step"],
                saves,
            ),
            f"{resume['megabytes']:.0f} MB in the checkpoint, resumed from cold files:",
            markdown(["resume", "s", "MB/s"], resumes),
            f"Median of {resume['verify_s'].rounds} rounds (lowest to highest).",
        ]
    )


def _settings(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    return {
        "config": Path(given.config).stem,
        "device": device.type,
        "rounds": given.rounds,
        "plain steps beside each save": given.steps,
    }


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, config="the model that is saved")
    add = made.add_argument
    add(
        "--rounds",
        type=positive,
        default=15,
        metavar="N",
        help="saves in each mode, and resumes (%(default)s)",
    )
    add("--steps", type=positive, default=1, metavar="N", help="plain steps between two saves (%(default)s)")
    add("--folder", type=Path, metavar="DIR", help="the disk that is measured (the system's /tmp)")
    return made


if __name__ == "__main__":
    sys.exit(main())
