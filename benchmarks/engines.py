"""The data-parallel engines compared: step time, traffic and memory, by number of ranks and microbatches per step.

    python benchmarks/engines.py                                  12 layers on the CPU, or on the available GPUs
    python benchmarks/engines.py --worlds 2 --accumulation 4      the row with a required ratio
    python benchmarks/engines.py --config 1b.toml --worlds 1      on a GPU

All engines of one row run in turns in the same processes. Prints the table and writes it, with date, versions and settings,
to benchmarks/results/. Other --section.key=value options override the config for every engine.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch
import torch.distributed as dist

from benchmarks.collectives import collectives_of
from benchmarks.loops import TINY, configure, settings_of
from benchmarks.measure import (
    Spread,
    against_bar,
    environment,
    markdown,
    parser,
    publish,
    ratio,
    require_learning,
    take_turns,
)
from benchmarks.ranks import rows_of_ranks
from forge.config import Config, check_world
from forge.data.build import build_dataset
from forge.data.loader import Loader
from forge.optim import build_optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.mesh import make_meshes
from forge.parallel.step.gradients import report_gradients
from forge.train.step import apply_gradients, compute_gradients
from scripts.options import exit_code_of, positive

ENGINES = ("fsdp2", "zero2", "zero1", "ddp")
MIB = 2**20
# (ranks, microbatches per step, engine) -> smallest accepted ratio of the engine's speed to that of fsdp2, on a CPU with the
# settings below.
BARS = {(2, 4, "zero1"): 1.15}
SHAPE = ("--model.n_layers=12", "--train.seq_len=128", "--train.micro_batch_size=1", "--optimizer.lr=1e-3")


class Engine:
    """The training step of one engine, without metrics and checkpoints."""

    def __init__(self, name: str, config: Config, device: torch.device):
        self.name, self._config = name, config
        meshes = make_meshes(check_world(config, dist.get_world_size()), device.type)
        self._model = build_parallel_model(config, meshes, device)
        self._optimizer = build_optimizer(self._model.shards, config.optimizer)
        self._batches = Loader(
            build_dataset(config),
            global_batch_size=config.train.global_batch_size,
            rank=meshes.data_rank,
            ranks=meshes.data_ranks,
            device=device,
            prefetch=config.data.prefetch,
        )
        self._losses: list[torch.Tensor] = []

    def step(self) -> None:
        lr, max_norm = self._config.optimizer.lr, self._config.train.grad_clip_norm
        sums = compute_gradients(self._model, next(self._batches))
        report = report_gradients(self._model.shards, sums.objective, stop=False)
        apply_gradients(self._model, self._optimizer, report, lr, max_norm)
        self._losses.append(sums.cross_entropy / sums.tokens)

    def sent(self) -> tuple[dict[str, int], float]:
        """Return a dict from each collective of a step to its number of calls, and the MiB of all their tensors.

        Collectives of at most 256 bytes are left out.
        """
        calls = [(name, size) for name, size in collectives_of(self.step).calls if size > 256]
        return dict(Counter(name for name, _ in calls)), sum(size for _, size in calls) / MIB

    def held(self) -> float:
        """Return the MiB of parameters, gradients and optimizer state on this rank."""
        moments = sum(values.nbytes for _, _, values in self._optimizer.tensors())
        return (sum(self._model.memory().values()) + moments) / MIB

    def losses(self) -> list[float]:
        return torch.stack(self._losses).tolist()

    def close(self) -> None:
        self._batches.close()


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    overrides = [*(TINY if given.tiny else SHAPE if given.config == "debug.toml" else ()), *overrides]
    return exit_code_of(lambda: measure(given, overrides))


def measure(given: argparse.Namespace, overrides: list[str]) -> None:
    """Measure with every number of ranks; print and write the table."""
    about = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    rows = [row for world in given.worlds for row in rows_of_ranks(world, _measure_all, given, overrides)]
    common = {key: value for key, value in rows[0]["settings"].items() if key != "global_batch_size"}
    about["settings"] = common
    publish("engines", given.output, about, {"rows": rows}, _table(rows))


def _measure_all(
    device: torch.device, given: argparse.Namespace, overrides: list[str]
) -> list[dict[str, Any]]:
    world = dist.get_world_size()
    return [row for number in given.accumulation for row in _measure(number, world, given, overrides, device)]


def _measure(
    accumulation: int, world: int, given: argparse.Namespace, overrides: list[str], device: torch.device
) -> list[dict[str, Any]]:
    engines = []
    for name in ENGINES:
        config = configure(given.config, *overrides)
        batch = accumulation * world * config.train.micro_batch_size
        wanted = (f"--train.global_batch_size={batch}", f"--parallel.data_parallel={name}")
        config = configure(given.config, *overrides, *wanted)
        engines.append(Engine(name, config, device))
    seconds = take_turns(engines, rounds=given.rounds, steps=given.steps, warmup=given.warmup, device=device)
    tokens = config.train.global_batch_size * config.train.seq_len
    barred = device.type == "cpu" and given.config == "debug.toml" and not given.tiny
    rows = []
    for engine in engines:
        collectives, sent = engine.sent()
        faster = ratio(seconds["fsdp2"], seconds[engine.name])
        step_ms = Spread.of([1000 * s for s in seconds[engine.name]])
        rows.append(
            {
                "ranks": world,
                "accumulation": accumulation,
                "engine": engine.name,
                "step_ms": step_ms.show(0),
                "tokens_per_second": 1000 * tokens / step_ms.median,
                "ratio": faster.show(2),
                "bar": BARS.get((world, accumulation, engine.name)) if barred else None,
                "met": faster,
                "collectives": collectives,
                "sent_mib": sent,
                "held_mib": engine.held(),
                "settings": settings_of(given, config, device),
            }
        )
    for engine in engines:
        require_learning(engine.name, engine.losses())
        engine.close()
    return rows


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["ranks", "microbatches", "engine", "ms per step", "tokens/s", "times fsdp2", "bar"]
    head += ["collectives", "MiB in them", "MiB held per rank"]
    lines = []
    for row in rows:
        sent = ", ".join(f"{number} {name}" for name, number in row["collectives"].items())
        lines.append(
            [
                str(row["ranks"]),
                str(row["accumulation"]),
                row["engine"],
                row["step_ms"],
                f"{row['tokens_per_second']:.0f}",
                row["ratio"],
                against_bar(row["bar"], row["met"]),
                sent or "none",
                f"{row['sent_mib']:.0f}",
                f"{row['held_mib']:.0f}",
            ]
        )
    return f"{markdown(head, lines)}\n\nMedians of all rounds (lowest to highest); ratios are taken round by round."


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, config="the model and its batch", rounds=5, steps=1, warmup=4)
    add = made.add_argument
    add("--worlds", type=positive, nargs="+", default=[1, 2, 4], metavar="N", help="numbers of ranks (1 2 4)")
    add(
        "--accumulation",
        type=positive,
        nargs="+",
        default=[1, 4, 16],
        metavar="N",
        help="microbatches (1 4 16)",
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
