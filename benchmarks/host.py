"""Host time of a step: forge compared with a bare PyTorch loop of forge's modules, on a very narrow model.

    python benchmarks/host.py

The model has 32 layers of width 16. Its operators compute almost nothing, so Python and PyTorch's launches take the whole
step. Runs with one process and with two. With two processes, the bare loop applies fully_shard to each layer. Prints the
table and writes it, with date, versions and settings, to benchmarks/results/. Other --section.key=value options override
the config.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.loops import BareLoop, ForgeLoop, compare, configure, joined, make_batches, settings_of
from benchmarks.measure import Contender, Spread, environment, markdown, parser, publish, ratio
from benchmarks.ranks import rows_of_ranks
from scripts.options import exit_code_of

NARROW = (
    "--model.dim=16",
    "--model.n_layers=32",
    "--model.n_heads=2",
    "--model.n_kv_heads=1",
    "--model.ffn_dim=32",
    "--model.vocab_size=64",
    "--train.seq_len=16",
    "--train.micro_batch_size=4",
    "--optimizer.lr=1e-2",
    "--precision.compute=float32",
)
# (processes, engine) -> largest accepted ratio of forge's step time to that of the bare loop with as many processes.
BARS = {(1, "fsdp2"): 1.10, (2, "fsdp2"): 1.15, (2, "zero1"): 1.0}
BARE = "bare"


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    return exit_code_of(lambda: measure(given, overrides))


def measure(given: argparse.Namespace, overrides: list[str]) -> None:
    """Measure all contenders; print and write the table."""
    torch.set_num_threads(1)
    layers = ["--model.n_layers=2"] if given.tiny else []
    plain = configure(given.config, *NARROW, *layers, *overrides)
    about = environment(torch.device("cpu"))
    about["settings"] = settings_of(given, plain, torch.device("cpu"))
    rows = []
    for world in (1, 2):
        batch = f"--train.global_batch_size={world * plain.train.micro_batch_size}"
        keys = [*NARROW, *layers, *overrides, batch]
        found = rows_of_ranks(world, _measure, given, keys)
        seconds = {row["name"]: row["seconds"] for row in found}
        for name, mine in seconds.items():
            bar = None if given.tiny or overrides else BARS.get((world, name))
            times = ratio(mine, seconds[BARE])
            rows.append({"processes": world, "loop": name, "seconds": mine, "ratio": times, "bar": bar})
    publish("host", given.output, about, {"rows": rows}, _table(rows))


def _measure(device: torch.device, given: argparse.Namespace, keys: list[str]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    world = joined().size
    engines = [engine for processes, engine in BARS if processes == world]

    def make(folder: Path) -> list[Contender]:
        configs = {
            name: configure(given.config, *keys, f"--parallel.data_parallel={name}") for name in engines
        }
        first = next(iter(configs.values()))
        batches = make_batches(first, given.warmup + given.rounds * given.steps, device)
        loops = [ForgeLoop(name, config, folder / name) for name, config in configs.items()]
        return [BareLoop(BARE, first, batches, device), *loops]

    return compare(make, given, device)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        bar, times = row["bar"], row["ratio"]
        step = Spread.of([1000 * s for s in row["seconds"]])
        against = "" if bar is None else f"{bar:.2f}: {'met' if times.median <= bar else 'missed'}"
        lines.append([str(row["processes"]), row["loop"], step.show(1), times.show(2), against])
    table = markdown(["processes", "loop", "ms per step", "times as long as bare", "at most"], lines)
    return f"{table}\n\nMedians of all rounds (lowest to highest); ratios are taken round by round."


def _parser() -> argparse.ArgumentParser:
    return parser(
        __doc__,
        config="config with the values of all keys that this benchmark does not set",
        rounds=9,
        steps=5,
        warmup=5,
    )


if __name__ == "__main__":
    sys.exit(main())
