"""Planned step time, compared with measured step time on this machine, for ten configurations.

    python benchmarks/planning.py

A round first measures the machine like scripts/measure_hardware.py, with one process and with two. Then it plans each
configuration with these measurements, and runs the configuration. With one thread (the default), the script measures the
machine and the steps of one process by processor time, so other work does not count. It measures steps of two ranks by wall
time. Prints the medians over rounds and writes the table, with date, versions and settings, to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch

from benchmarks.measure import environment, markdown, parser, publish
from benchmarks.ranks import rows_of_ranks
from forge.batch import Batch
from forge.config import check_world, load_config
from forge.optim import build_optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.initialize import initialize
from forge.parallel.mesh import make_meshes
from forge.parallel.step.gradients import report_gradients
from forge.tools.plan.hardware import Hardware
from forge.tools.plan.plan import make_plan
from forge.train.step import apply_gradients, compute_gradients
from scripts.measure_hardware import measure
from scripts.options import exit_code_of

BASE = ("--train.global_batch_size=8", "--train.micro_batch_size=4", "--model.vocab_size=4096")
# Name -> (ranks, base config, overrides).
CONFIGS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "debug": (1, "debug", ()),
    "wider": (1, "debug", ("--model.dim=512", "--model.ffn_dim=1408")),
    "deeper": (1, "debug", ("--model.n_layers=8",)),
    "longer sequences": (1, "debug", ("--train.seq_len=1024", "--train.micro_batch_size=1")),
    "small microbatches": (1, "debug", ("--train.micro_batch_size=1",)),
    "recomputed": (1, "debug", ("--activation_checkpoint.mode=full",)),
    "large vocabulary": (1, "debug", ("--model.vocab_size=16384",)),
    "experts": (1, "moe_debug", ()),
    "two ranks, fsdp2": (2, "debug", ()),
    "two ranks, tensor": (2, "debug", ("--parallel.tp=2",)),
}
BAR = 0.2


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given = parser(__doc__, rounds=3, steps=5, warmup=2, threads=1).parse_args(arguments)
    return exit_code_of(lambda: compare(given))


def compare(given: argparse.Namespace) -> None:
    """Plan and run every configuration; print and write the table."""
    torch.set_num_threads(given.threads)
    rounds: list[dict[str, Any]] = []
    for number in range(given.rounds):
        machine = {ranks: measure(given.threads, ranks, tiny=given.tiny) for ranks in (1, 2)}
        found = {}
        for name, (ranks, base, overrides) in CONFIGS.items():
            hardware = Hardware.model_validate(machine[ranks])
            found[name] = _one(ranks, base, overrides, hardware, given)
            estimate, run = found[name]["estimate_s"], found[name]["step_s"]
            print(f"round {number + 1}, {name}: {estimate:.3f} s planned, {run:.3f} s measured", flush=True)
        rounds.append({"machine": machine, "load": os.getloadavg()[0], "configurations": found})
        # Write after each round, so that an interrupted benchmark keeps its measurements.
        _publish(rounds, given)


def _publish(rounds: list[dict[str, Any]], given: argparse.Namespace) -> None:
    rows = [_row(name, [one["configurations"][name] for one in rounds]) for name in CONFIGS]
    table = markdown(["configuration", "planned, s", "measured, s", "error", "in each round"], rows)
    errors = {name: _error([one["configurations"][name] for one in rounds]) for name in CONFIGS}
    within = sum(abs(error) <= BAR for error in errors.values())
    loads = ", ".join(f"{one['load']:.1f}" for one in rounds)
    about = environment(torch.device("cpu"))
    about["settings"] = {
        "device": "cpu",
        **{name: getattr(given, name) for name in ("rounds", "steps", "warmup", "threads")},
    }
    publish(
        "planning",
        given.output,
        about,
        {"rounds": rounds, "errors": errors},
        f"{table}\n\n{within} of {len(CONFIGS)} within {BAR:.0%}. Load after each round: {loads}.",
    )


def _one(
    ranks: int, base: str, overrides: tuple[str, ...], hardware: Hardware, given: argparse.Namespace
) -> dict[str, float]:
    """Return the planned and the measured seconds of a step."""
    argv = [f"--config={base}", *BASE, *overrides]
    if given.tiny:
        argv += ["--model.dim=64", "--model.ffn_dim=64", "--model.n_layers=2", "--train.seq_len=64"]
    config = load_config(argv)
    speed = make_plan(config, check_world(config, ranks), hardware).speed
    assert speed is not None
    (run,) = rows_of_ranks(ranks, _run, argv, given.warmup, given.steps, given.threads)
    return {"estimate_s": speed.step_s} | run


def _run(
    device: torch.device, argv: list[str], warmup: int, steps: int, threads: int
) -> list[dict[str, float]]:
    """Run optimizer steps on random tokens. Return the median, least and most seconds of this rank's steps. Collective."""
    torch.set_num_threads(threads)
    clock = time.process_time if torch.distributed.get_world_size() == threads == 1 else time.perf_counter
    config = load_config(argv)
    degrees = check_world(config, torch.distributed.get_world_size())
    meshes = make_meshes(degrees, device.type)
    model = build_parallel_model(config, meshes, device, values=initialize)
    optimizer = build_optimizer(model.shards, config.optimizer, meshes.stage)
    train = config.train
    shape = (degrees.accumulation * train.micro_batch_size, train.seq_len)
    tokens = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch, seconds = Batch(tokens, tokens), []
    for _ in range(warmup + steps):
        start = clock()
        sums = compute_gradients(model, batch)
        report = report_gradients(model.shards, sums.objective, stop=False)
        apply_gradients(model, optimizer, report, config.optimizer.lr, train.grad_clip_norm)
        seconds.append(clock() - start)
    last = seconds[warmup:]
    return [{"step_s": statistics.median(last), "least_s": min(last), "most_s": max(last)}]


def _error(found: list[dict[str, float]]) -> float:
    return statistics.median(one["estimate_s"] / one["step_s"] - 1 for one in found)


def _row(name: str, found: list[dict[str, float]]) -> list[str]:
    planned, measured = (statistics.median(one[key] for one in found) for key in ("estimate_s", "step_s"))
    each = ", ".join(f"{one['estimate_s'] / one['step_s'] - 1:+.0%}" for one in found)
    return [name, f"{planned:.3f}", f"{measured:.3f}", f"{_error(found):+.0%}", each]


if __name__ == "__main__":
    sys.exit(main())
