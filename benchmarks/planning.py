"""The estimate of a plan against the time of real steps, on this machine, for ten configurations.

    python benchmarks/planning.py

Measures the machine as scripts/measure_hardware.py does, once with all cores and once with one for each of two ranks, plans
each configuration with that, runs it, and prints both. Writes the table, with date, versions and settings, to
benchmarks/results/.
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
from forge.config import check_world, load_config
from forge.data.loader import Batch
from forge.optim import build_optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.gradients import clip_gradients, report_gradients
from forge.parallel.initialize import initialize
from forge.parallel.mesh import make_meshes
from forge.plan.hardware import Hardware
from forge.plan.plan import make_plan
from scripts.measure_hardware import measure
from scripts.options import exit_code_of

BASE = ("--train.global_batch_size=8", "--train.micro_batch_size=4", "--model.vocab_size=4096")
# Name -> (ranks, base, overrides).
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
    return exit_code_of(lambda: compare(parser(__doc__, steps=5, warmup=2).parse_args(arguments)))


def compare(given: argparse.Namespace) -> None:
    """Plan and run every configuration; print and write the table."""
    cores = len(os.sched_getaffinity(0))
    hardware = {
        ranks: Hardware.model_validate(measure(max(1, cores // ranks), tiny=given.tiny)) for ranks in (1, 2)
    }
    rows: list[dict[str, Any]] = []
    for name, (ranks, base, overrides) in CONFIGS.items():
        argv = [f"--config={base}", *BASE, *overrides]
        if given.tiny:
            argv += ["--model.dim=64", "--model.ffn_dim=64", "--train.seq_len=64"]
        torch.set_num_threads(1)
        config = load_config(argv)
        speed = make_plan(config, check_world(config, ranks), hardware[ranks]).speed
        assert speed is not None
        (run,) = rows_of_ranks(ranks, _run, argv, given.warmup, given.steps)
        error = speed.step_s / run["step_s"] - 1
        rows.append({"name": name, "estimate_s": speed.step_s, "error": error} | run)
        print(
            f"{name}: estimate {speed.step_s:.3f} s, measured {run['step_s']:.3f} s, {error:+.0%}", flush=True
        )
    table = markdown(
        ["configuration", "estimate, s", "measured, s", "fastest to slowest", "error"],
        [
            [
                row["name"],
                f"{row['estimate_s']:.3f}",
                f"{row['step_s']:.3f}",
                f"{row['least_s']:.3f} to {row['most_s']:.3f}",
                f"{row['error']:+.0%}",
            ]
            for row in rows
        ],
    )
    within = sum(abs(row["error"]) <= BAR for row in rows)
    about = environment(torch.device("cpu")) | {"settings": vars(given) | {"output": str(given.output)}}
    about |= {"hardware": {ranks: found.model_dump() for ranks, found in hardware.items()}}
    publish(
        "planning",
        given.output,
        about | {"rows": rows},
        f"{table}\n\n{within} of {len(rows)} within {BAR:.0%}",
    )


def _run(device: torch.device, argv: list[str], warmup: int, steps: int) -> list[dict[str, Any]]:
    """The median time of this rank's steps, each a whole optimizer step on random tokens."""
    config = load_config(argv)
    degrees = check_world(config, torch.distributed.get_world_size())
    meshes = make_meshes(degrees, device.type)
    model = build_parallel_model(config, meshes, device, values=initialize)
    optimizer = build_optimizer(model.shards, config.optimizer, meshes.stage)
    train = config.train
    shape = (degrees.accumulation * train.micro_batch_size, train.seq_len)
    tokens = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch, found = Batch(tokens, tokens), []
    for _ in range(warmup + steps):
        start = time.perf_counter()
        sums = model.forward_backward(batch, model.count_tokens(batch))
        model.finalize_gradients()
        report = report_gradients(model.shards, sums.objective, stop=False)
        clip_gradients(model.shards, report.norm, train.grad_clip_norm)
        optimizer.step(config.optimizer.lr, report.skip)
        model.after_update()
        model.update_router(report.skip)
        model.zero_gradients()
        found.append(time.perf_counter() - start)
    last = found[warmup:]
    return [{"step_s": statistics.median(last), "least_s": min(last), "most_s": max(last)}]


if __name__ == "__main__":
    sys.exit(main())
