"""The cost of joining the ranks, by world size: process groups, sockets, and seconds until every mesh exists.

    python benchmarks/startup.py                          gloo on 2 to 32 processes, fake ranks of 64 to 8,192; five minutes
    python benchmarks/startup.py --worlds 8 --fake 1024

For comparison, the table has three meshes of PyTorch's init_device_mesh with forge's axes and a group per axis. The script
measures gloo twice. By default, all ranks of a group connect to each other at once. With TORCH_GLOO_LAZY_INIT=1, two ranks
connect at their first message. The time includes the first all-reduce of each group. Rows of fake ranks show the work of
one process among many, without connections. Prints the table and writes it, with date, versions and settings, to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.measure import environment, markdown, parser, publish
from benchmarks.ranks import Row, rows_of_ranks
from forge.config import Degrees
from forge.parallel.mesh import make_meshes
from forge.runtime.errors import UserError
from forge.tools.plan.fake import fake_ranks
from scripts.options import exit_code_of, positive

LAZY = "TORCH_GLOO_LAZY_INIT"


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and return the exit code."""
    given = _parser().parse_args(arguments)
    return exit_code_of(lambda: measure(given))


def measure(given: argparse.Namespace) -> None:
    """Start the ranks of every world size; print and write the table."""
    for world in [*given.worlds, *given.fake]:
        degrees_of(world)  # reports a wrong number before any process starts
    about = environment(torch.device("cpu"))
    before = os.environ.get(LAZY)
    rows: list[Row] = []
    try:
        for world in given.worlds:
            for lazy in ("0", "1"):
                os.environ[LAZY] = lazy
                rows += rows_of_ranks(world, started)
    finally:
        os.environ.pop(LAZY, None)
        if before is not None:
            os.environ[LAZY] = before
    for world in given.fake:
        for maker in MAKERS:
            with fake_ranks(0, world):
                rows.append(made(maker, "fake"))
    about |= {
        "settings": {"device": "cpu", "layout": "tp 2, pp 2, dp_replicate 2 as far as the world allows; ep 2"}
    }
    publish("startup", given.output, about, {"rows": rows}, _table(rows))


def degrees_of(world: int) -> Degrees:
    """Return degrees with as many axes of size > 1 as `world` ranks allow."""
    if world % 2:
        raise UserError(f"{world} ranks cannot be divided by 2; give even numbers")
    tp, rest = 2, world // 2
    pp = 2 if rest % 2 == 0 else 1
    rest //= pp
    dp_replicate = 2 if rest % 2 == 0 else 1
    return Degrees(
        world=world,
        pp=pp,
        dp_replicate=dp_replicate,
        dp_shard=rest // dp_replicate,
        cp=1,
        tp=tp,
        ep=2,
        accumulation=pp,
    )


def forge_meshes(degrees: Degrees) -> None:
    """Make forge's meshes. Collective."""
    make_meshes(degrees, "cpu")


def mesh_per_view(degrees: Degrees) -> None:
    """Make the meshes for FSDP, experts and context parallelism with init_device_mesh. They share no groups. Collective."""
    d = degrees
    for shape in (
        (d.pp, d.dp_replicate, d.dp_shard * d.cp, d.tp),
        (d.pp, d.dp_replicate, d.ep_shard, d.ep),
        (d.pp, d.dp_replicate, d.dp_shard, d.cp, d.tp),
    ):
        init_device_mesh("cpu", shape)


MAKERS: dict[str, Callable[[Degrees], None]] = {"forge": forge_meshes, "init_device_mesh": mesh_per_view}


def started(device: torch.device) -> list[Row]:
    """Return this rank's rows: one for each way to make meshes. Collective."""
    return [made(maker, "gloo, lazy" if os.environ[LAZY] == "1" else "gloo") for maker in MAKERS]


def made(maker: str, groups: str) -> Row:
    """Make all meshes, all-reduce once over each of their groups, and return this rank's row. Collective."""
    world, began = dist.get_world_size(), time.perf_counter()
    degrees = degrees_of(world)
    before = _groups()
    sockets = _sockets()
    MAKERS[maker](degrees)
    own = [group for group in _groups() if group not in before]
    if groups != "fake":
        for group in own:
            dist.all_reduce(torch.ones(()), group=group)
    seconds = time.perf_counter() - began
    return {
        "ranks": world,
        "groups": groups,
        "maker": maker,
        "made": len(own),
        "sockets": _sockets() - sockets,
        "seconds": seconds,
    }


def _groups() -> list[Any]:
    """Return the process groups of this rank."""
    return list(dist.distributed_c10d._world.pg_map)


def _sockets() -> int:
    count = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except FileNotFoundError:  # the descriptor opened for the listing
            continue
    return count


def _table(rows: list[Row]) -> str:
    head = ["ranks", "back-end", "made by", "groups of a rank", "sockets of a rank", "seconds"]
    lines = [
        [
            f"{row['ranks']:,}",
            row["groups"],
            row["maker"],
            str(row["made"]),
            str(row["sockets"]),
            f"{row['seconds']:.3f}",
        ]
        for row in rows
    ]
    return f"{markdown(head, lines)}\n\nBeside those of the default group. Seconds of rank 0, one start each."


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, tiny=False)
    add = made.add_argument
    add(
        "--worlds",
        type=positive,
        nargs="*",
        default=[2, 4, 8, 16, 32],
        metavar="N",
        help="real ranks (2 4 8 16 32)",
    )
    add(
        "--fake",
        type=positive,
        nargs="*",
        default=[64, 512, 1024, 4096, 8192],
        metavar="N",
        help="fake ranks (64 to 8192)",
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
