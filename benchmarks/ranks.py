"""Benchmarks of several processes on this machine."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from forge.runtime.cores import cores
from forge.runtime.errors import FAILED, UserError
from forge.runtime.world import join, read_world

Row = dict[str, Any]


def rows_of_ranks(world: int, measure: Callable[..., list[Row]], *arguments: Any) -> list[Row]:
    """Call `measure(device, *arguments)` on `world` joined processes; return the rows of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows"
        try:
            processes.spawn(_rank, (world, port, found, measure, arguments), nprocs=world)
        except processes.ProcessRaisedException as error:
            raise UserError(f"on {world} ranks: {str(error).strip()}", exit_code=FAILED) from error
        rows: list[Row] = pickle.loads(found.read_bytes())
        return rows


def _rank(
    rank: int,
    world: int,
    port: int,
    found: Path,
    measure: Callable[..., list[Row]],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(max(1, cores() // world))
    here = read_world()
    join(here)
    rows = measure(here.device, *arguments)
    if rank == 0:
        found.write_bytes(pickle.dumps(rows))
    dist.barrier()
