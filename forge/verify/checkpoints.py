"""Checkpoints of a layout: what it saved, what it loads of another layout's, and what it goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.checkpoint import Checkpoints, read_state
from forge.optim import Optimizer
from forge.parallel.model import ParallelModel
from forge.shard import Shard
from forge.train.optimizers import load_training_state
from forge.train.resume import ResumePoint
from forge.train.state import all_tensors
from forge.verify.pieces import Key, Piece, pieces_of, whole

LAYOUT, ONE = "layout", "one"


def save(
    folder: str, name: str, step: int, tensors: dict[str, tuple[Shard, Tensor]], optimizer: Optimizer
) -> None:
    """Save tensors and the optimizer's state as the checkpoint of `step` in `folder`/`name`. Collective."""
    state: dict[str, Any] = {"progress": {"step": step}, "optimizer": optimizer.state()}
    (outcome,) = Checkpoints(Path(folder) / name, mode="sync").save(step, tensors, state, {}, {})
    if outcome.error is not None:
        raise RuntimeError(f"the checkpoint cannot be saved: {outcome.error}")


def save_and_read(
    model: ParallelModel, optimizer: Optimizer, folder: str, step: int
) -> dict[Key, list[Piece]]:
    """Save the layout's checkpoint, and return its tensors (kind `saved`), read as whole ones, on rank 0. Collective."""
    tensors = all_tensors(model, optimizer)
    save(folder, LAYOUT, step, tensors, optimizer)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: (s.global_shape, v.dtype) for name, (s, v) in tensors.items()})
    formats = {name: value for one in everyone for name, value in one.items()}
    wholes = {
        name: torch.full(tuple(shape), torch.nan if dtype.is_floating_point else -1, dtype=dtype)
        for name, (shape, dtype) in formats.items()
    }
    checkpoints = Checkpoints(Path(folder) / LAYOUT, mode="sync")
    checkpoints.load(
        checkpoints.path(step), {name: (Shard.whole(name, values), values) for name, values in wholes.items()}
    )
    return {("saved", name): [whole(values)] for name, values in wholes.items() if dist.get_rank() == 0}


def resume(model: ParallelModel, optimizer: Optimizer, folder: str, step: int) -> None:
    """Go back to the layout's own checkpoint. Collective."""
    _load(model, optimizer, Path(folder) / LAYOUT, step)


def load_of_one(model: ParallelModel, optimizer: Optimizer, folder: str, step: int) -> dict[Key, list[Piece]]:
    """Load the checkpoint of one process, and return what this rank then has of its tensors (kind `loaded`). Collective."""
    _load(model, optimizer, Path(folder) / ONE, step)
    found: dict[Key, list[Piece]] = {}
    for name, (shard, values) in all_tensors(model, optimizer).items():
        found["loaded", name] = pieces_of("", [(shard, values)])["", shard.name]
    return found


def _load(model: ParallelModel, optimizer: Optimizer, folder: Path, step: int) -> None:
    for _, values in all_tensors(model, optimizer).values():
        # What a checkpoint leaves out must not look right.
        values.fill_(torch.nan if values.is_floating_point() else -1)
    path = Checkpoints(folder, mode="sync").path(step)
    load_training_state(ResumePoint(path, read_state(path)), model, optimizer)
