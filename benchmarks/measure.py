"""Shared by all benchmarks: options, measurement in turns, a check that the loss falls, and results files."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch

from forge.runtime.cores import cores
from forge.runtime.errors import FAILED, UserError
from scripts.options import count, positive

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "transformers", "torchao", "numpy", "triton")
# Nats by which the loss must fall. On the synthetic stream it starts at ln(vocab_size) and is far lower after ten
# steps; batches differ by a few hundredths.
LEAST_GAIN = 0.2
# Largest load of other work per core for a published timing.
MAX_LOAD = 0.25


COUNTS = {
    "rounds": "turns that every contender gets",
    "steps": "optimizer steps in a turn",
    "warmup": "steps before the first turn",
    "threads": "of PyTorch on the CPU",
}


def parser(
    description: str | None, *, config: str = "", tiny: bool = True, **counts: int
) -> argparse.ArgumentParser:
    """Return a parser with the options shared by benchmarks.

    config: default of --config; "" leaves this option out.
    counts: option of COUNTS -> its default; options of COUNTS without a default are left out.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = made.add_argument
    if config:
        add("--config", default="debug.toml", metavar="PATH_OR_NAME", help=f"{config} (%(default)s)")
    for name, default in counts.items():
        add(
            f"--{name}",
            type=count if name == "warmup" else positive,
            default=default,
            metavar="N",
            help=f"{COUNTS[name]} (%(default)s)",
        )
    add(
        "--output",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="folder for the results (benchmarks/results)",
    )
    if tiny:
        add("--tiny", action="store_true", help="run at toy size, to test the script; measures nothing")
    return made


class Contender(Protocol):
    """A training loop under measurement."""

    name: str

    def step(self) -> None:
        """Make one optimizer step. May return before the device has finished."""

    def losses(self) -> list[float]:
        """Return the mean cross-entropy per token of past steps, in order. Some steps may be missing."""

    def close(self) -> None:
        """Release the resources of this contender."""


@dataclass(frozen=True)
class Spread:
    """The median and the extremes of repeated measurements."""

    median: float
    low: float
    high: float
    rounds: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values), len(values))

    def show(self, digits: int = 3) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def take_turns(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    steps: int,
    warmup: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return contender -> seconds per step in each round, measured by `clock`.

    In a round every contender makes `steps` steps. Each round starts with another contender, so a drift of the machine's
    speed affects all contenders equally. Before the first round, each contender makes `warmup` steps.
    """
    for contender in contenders:
        for _ in range(warmup):
            contender.step()
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for place in range(len(contenders)):
            contender = contenders[(number + place) % len(contenders)]
            synchronize(device)
            began = clock()
            for _ in range(steps):
                contender.step()
            synchronize(device)
            seconds[contender.name].append((clock() - began) / steps)
    return seconds


def ratio(base: Sequence[float], mine: Sequence[float]) -> Spread:
    """Return the speedup of `mine` over `base`, with its spread over rounds. base, mine: seconds per step of each round."""
    return Spread.of([b / m for b, m in zip(base, mine, strict=True)])


def require_learning(name: str, losses: Sequence[float], least_gain: float = LEAST_GAIN) -> None:
    """Raise UserError (exit 1) unless the loss fell by `least_gain` nats: a speed without learning means nothing."""
    last = statistics.fmean(losses[-max(1, len(losses) // 4) :]) if losses else float("nan")
    if len(losses) < 2 or not losses[0] - last >= least_gain:  # this form also refuses NaN
        raise UserError(
            f"{name}: its loss did not fall by {least_gain} nats on learnable data (it went from "
            f"{losses[0] if losses else float('nan'):.3f} to {last:.3f}); a model that does not learn is not "
            "reported",
            exit_code=FAILED,
        )


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has finished its work; no effect on other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of `action` and its wall time, seconds."""
    began = time.perf_counter()
    result = action()
    return result, time.perf_counter() - began


def environment(device: torch.device) -> dict[str, Any]:
    """Return the date, the machine and package versions for a results file."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "versions": {"forge": _commit(), "python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES},
        "load": os.getloadavg()[0],
        "command": shlex.join(["python", *sys.argv]),
    }


def write_results(
    name: str, folder: Path, about: dict[str, Any], results: dict[str, Any], table: str
) -> Path:
    """Write FOLDER/DATE-DEVICE-NAME.json, and the table beside it as .md. Return the path of the JSON file."""
    folder.mkdir(parents=True, exist_ok=True)
    short = "cpu" if "cpu" in about["settings"]["device"] else about["device"].replace(" ", "-").lower()
    path = folder / f"{about['date']}-{short}-{name}.json"
    content = about | {"results": results}
    path.write_text(json.dumps(content, indent=1, default=_plain) + "\n")
    path.with_suffix(".md").write_text(heading(name, about) + table + "\n")
    return path


def publish(
    name: str,
    folder: Path,
    about: dict[str, Any],
    results: dict[str, Any],
    table: str,
    *,
    timed: bool = True,
) -> Path:
    """Print the table, write the results files, and return the path of the JSON file.

    timed: the results depend on the speed of the machine.

    If `folder` is the folder of published results, raises UserError (exit 1) in two cases: forge is not a clean commit, or
    the results are timed and the machine was busy.
    """
    print(table)
    require_publishable(folder, about, timed=timed)
    path = write_results(name, folder, about, results, table)
    print(f"\nwritten to {path}", file=sys.stderr)
    return path


def require_publishable(folder: Path, about: dict[str, Any], *, timed: bool) -> None:
    """Raise UserError (exit 1) if `publish` would refuse to write to `folder`. Call this function before long work."""
    if folder.resolve() == RESULTS:
        commit = about["versions"]["forge"] or ""
        if timed and is_busy(about):
            raise UserError(
                f"not published: the machine was busy before the start (load {about['load']:.1f} on {about['cores']} cores)",
                FAILED,
            )
        if not commit or commit.endswith("-dirty"):
            raise UserError("not published: forge is not a clean commit", FAILED)


def is_busy(about: dict[str, Any]) -> bool:
    """Return whether other programs used the machine when `environment` returned `about`."""
    return about["load"] > MAX_LOAD * about["cores"]


def heading(name: str, about: dict[str, Any]) -> str:
    """Return the lines above a table: benchmark, date, machine, versions and settings."""
    versions = ", ".join(f"{package} {found}" for package, found in about["versions"].items() if found)
    settings = ", ".join(f"{key} {value}" for key, value in about["settings"].items())
    return (
        f"## {name}\n\n{about['date']}, {about['device']}, {about['cores']} cores, {about['threads']} threads; "
        f"{versions}; load before {about['load']:.1f}.\n{settings}.\n\n    {about['command']}\n\n"
    )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def against_bar(bar: float | None, found: Spread | float) -> str:
    """Return the bar (a minimum) and "met", "missed", or "undecided" if the measured range includes the bar."""
    if bar is None:
        return ""
    low, high = (found.low, found.high) if isinstance(found, Spread) else (found, found)
    return f"{bar}: {'met' if low >= bar else 'missed' if high < bar else 'undecided'}"


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Spread) else str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return forge's commit as `git describe` names it; None outside a clone."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
