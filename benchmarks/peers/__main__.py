"""Train a task by a peer, and write its curve: `torchrun --nproc-per-node N -m benchmarks.peers PEER FOLDER`."""

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
    # The packages name float32 for norms, rotary frequencies and losses; here the name means float64.
    torch.float32 = torch.float = torch.float64  # type: ignore[misc]
    Tensor.float = Tensor.double  # type: ignore[method-assign]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# Imported last: the packages read the names when they are imported.
curve = importlib.import_module(f"benchmarks.peers.{peer}").train(task, rank, world)
if rank == 0:
    curve.save(folder)
