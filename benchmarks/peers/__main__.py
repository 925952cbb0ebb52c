"""Train a task with another package and write the curve: `torchrun --nproc-per-node N -m benchmarks.peers PEER FOLDER`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.peers.task import Task

peer, folder = sys.argv[1], Path(sys.argv[2])
task = Task.load(folder)
if task.dtype == "float64":
    # For float64 runs. The packages ask for float32 in norms, rotary frequencies and losses. They now get float64.
    torch.float32 = torch.float = torch.float64  # type: ignore[misc]
    Tensor.float = Tensor.double  # type: ignore[method-assign]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# Imported last: the packages read torch.float32 on import.
curve = importlib.import_module(f"benchmarks.peers.{peer}").train(task, rank, world)
if rank == 0:
    curve.save(folder)
