#!/usr/bin/env python
"""Check GPUs, links and kernels against the rates assumed by train.py --plan, with one process per GPU.

torchrun --nproc-per-node 8 scripts/check_node.py
srun --nodes=64 --ntasks-per-node=8 --gpus-per-node=8 python scripts/check_node.py

Checks each GPU: name, memory, uncorrected ECC errors, a matrix product, causal attention and a copy in memory. Checks
all-reduce, all-gather, reduce-scatter and all-to-all in each node and over all nodes. Checks that every result is correct,
and compares every rate with the rate assumed by --plan. Rates of collectives are bus bandwidths, as in nccl-tests.

Exit codes: 0 all results are right, and all compared rates reach the required fractions of the assumed rates; 1 a check
failed; 2 a wrong option, no GPU, or a GPU unknown to the planner. torchrun turns every code except 0 into 1.

To try the command without a GPU, use --device cpu, which runs the checks over gloo. On a CPU, the command does not compare
name, memory, driver and ECC. It compares rates only with a --hardware file of scripts/measure_hardware.py.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch
import torch.distributed as dist

from forge.observe.json_lines import encode
from forge.runtime.distributed import gather_from_ranks
from forge.runtime.errors import FAILED, FINISHED, UserError
from forge.runtime.world import World, join
from forge.tools.plan.hardware import Hardware, card_of, find_hardware
from forge.tools.plan.node import ON_CPU, ON_GPU, measure_rank
from forge.tools.plan.node_report import COMPUTE, LINKS, as_json, compare, problems_of, table
from scripts.options import Options, exit_code_of_ranks, number, positive

fraction = number(float, lambda value: value > 0, "more than 0")


def main(arguments: list[str] | None = None) -> int:
    """Run this process's part of the checks. Return the exit code: FAILED if a check failed on any rank. Collective."""
    given = _parser().parse_args(arguments)
    failed: list[str] = []
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CUDA starts
    code = exit_code_of_ranks(lambda world: failed.extend(_run(given, world)), "interrupted")
    return FAILED if code == FINISHED and failed else code


def _run(given: argparse.Namespace, world: World) -> list[str]:
    """Run all checks, print them on rank 0, and return the problems on every rank. Collective."""
    try:
        hardware = _hardware(given, world)
        join(world, timedelta(minutes=5))
    except UserError as error:
        if world.rank and world.local_rank == 0:  # rank 0 waits for this node and prints nothing itself
            print(f"forge: {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
        raise
    gpus = given.gpus or (hardware.cards_per_node if hardware and hardware.card else 0)
    if hardware and gpus:
        hardware = hardware.model_copy(update={"cards_per_node": gpus})
    sizes = ON_GPU if given.device == "cuda" else ON_CPU
    try:
        record = measure_rank(world, sizes)
        records = gather_from_ranks("reporting", lambda: record)
    finally:
        dist.destroy_process_group()
    checks = compare(records, hardware, sizes, compute=given.compute, links=given.links)
    problems = problems_of(records, checks, hardware, gpus)
    if world.rank == 0 and given.json:
        print(encode(as_json(records, checks, problems)).decode(), end="", flush=True)
    elif world.rank == 0:
        print(table(records, checks))
        nodes = len({record.host for record in records})
        rated = sum(check.ratio is not None for check in checks)
        passed = f"passed: all {len(checks)} results are right, {rated} rates were compared"
        print(f"\n{len(records)} processes, {nodes} node{'s' if nodes > 1 else ''}: ", end="")
        print("\n".join(["failed", *problems]) if problems else passed, flush=True)
    return problems


def _hardware(given: argparse.Namespace, world: World) -> Hardware | None:
    """Return the hardware with the planned rates: --hardware, or this process's GPU. None on a CPU without --hardware.

    Raises UserError if there is no GPU, or if the planner does not know the GPU.
    """
    named = None if given.hardware is None else find_hardware(given.hardware)
    if given.device == "cpu":
        if named and named.card:
            raise UserError(
                f"--hardware {given.hardware}: describes a GPU; for a CPU write a file with scripts/measure_hardware.py"
            )
        return named
    if not torch.cuda.is_available():
        raise UserError(
            "this process sees no GPU: look at nvidia-smi, CUDA_VISIBLE_DEVICES and the build of PyTorch, or try the "
            "command with --device cpu"
        )
    name = torch.cuda.get_device_name(0)
    found = named or card_of(name)
    if found is None:
        raise UserError(
            f"--hardware is missing, and the planner does not know {name}: write a file with scripts/measure_hardware.py"
        )
    return found


def _parser() -> Options:
    parser = Options(description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="devices to check (%(default)s)")
    names = "h100, h200, b200, a100, l40s, or a TOML file (default: the file for this GPU's name)"
    add("--hardware", metavar="NAME", help=f"source of the planned rates: {names}")
    add("--gpus", type=positive, metavar="N", help="expected GPUs per node (as in the hardware file)")
    slow = "required fraction of the planned rate"
    add("--compute", type=fraction, default=COMPUTE, metavar="F", help=f"kernels: {slow} (%(default)s)")
    add("--links", type=fraction, default=LINKS, metavar="F", help=f"collectives: {slow} (%(default)s)")
    add("--json", action="store_true", help="print one JSON object instead of text")
    return parser


if __name__ == "__main__":
    sys.exit(main())
