"""Save and load checkpoints of verified layouts.

A folder has the checkpoint of one layout, and a file with the unsharded tensors of this checkpoint. One rank reads the
checkpoint back to write the file. Another layout that loads the checkpoint must have these tensors, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.checkpoint import Checkpoints, read_state
from forge.optim import Optimizer
from forge.parallel.step.model import ParallelModel
from forge.run.restore import load_training_state
from forge.run.resume import ResumePoint
from forge.runtime.distributed import gather_from_ranks
from forge.shard import Shard
from forge.tools.verify.pieces import TensorKey, TensorPiece, pieces_of, whole
from forge.train.state import all_tensors

WHOLE = "whole.pt"


def save(folder: str, step: int, tensors: dict[str, tuple[Shard, Tensor]], optimizer: Optimizer) -> None:
    """Save `tensors` and the optimizer's state as the checkpoint of `step` in `folder`. Collective.

    Raises RuntimeError if the save fails.
    """
    state: dict[str, Any] = {"progress": {"step": step}, "optimizer": optimizer.state()}
    (outcome,) = Checkpoints(Path(folder), mode="sync").save(step, tensors, state, {}, {})
    if outcome.error is not None:
        raise RuntimeError(f"the checkpoint cannot be saved: {outcome.error}")


def save_and_read(
    model: ParallelModel, optimizer: Optimizer, folder: str, step: int
) -> dict[TensorKey, list[TensorPiece]]:
    """Save the layout's checkpoint and read it back. Return the whole tensors (kind `saved`) on rank 0. Collective.

    Other ranks return an empty dict.
    """
    tensors = all_tensors(model, optimizer)
    save(folder, step, tensors, optimizer)
    own = {name: (shard.global_shape, values.dtype) for name, (shard, values) in tensors.items()}
    everyone = gather_from_ranks("sharing the formats of tensors", lambda: own)
    formats = {name: value for one in everyone for name, value in one.items()}
    wholes = {
        name: torch.full(tuple(shape), torch.nan if dtype.is_floating_point else -1, dtype=dtype)
        for name, (shape, dtype) in formats.items()
    }
    checkpoints = Checkpoints(Path(folder), mode="sync")
    checkpoints.load(
        checkpoints.path(step), {name: (Shard.whole(name, values), values) for name, values in wholes.items()}
    )
    if dist.get_rank() != 0:
        return {}
    keep_whole(folder, wholes)
    return {("saved", name): [whole(values)] for name, values in wholes.items()}


def keep_whole(folder: str, wholes: dict[str, Tensor]) -> None:
    """Write the unsharded tensors `wholes` to the file WHOLE in `folder`. `read_whole` reads the file."""
    torch.save(wholes, Path(folder) / WHOLE)


def read_whole(folder: str) -> dict[TensorKey, Tensor]:
    """Return the unsharded tensors of the checkpoint in `folder`, under kind `loaded`. A load must yield these values."""
    wholes: dict[str, Tensor] = torch.load(Path(folder) / WHOLE)
    return {("loaded", name): values for name, values in wholes.items()}


def load(
    model: ParallelModel, optimizer: Optimizer, folder: str, step: int
) -> dict[TensorKey, list[TensorPiece]]:
    """Load the checkpoint of `step` in `folder`. Return this rank's pieces of all tensors (kind `loaded`). Collective."""
    for _, values in all_tensors(model, optimizer).values():
        # Overwrite all values, so that a tensor missing from the checkpoint cannot pass with its old values.
        values.fill_(torch.nan if values.is_floating_point() else -1)
    path = Checkpoints(Path(folder), mode="sync").path(step)
    load_training_state(ResumePoint(path, read_state(path)), model, optimizer)
    found: dict[TensorKey, list[TensorPiece]] = {}
    for name, (shard, values) in all_tensors(model, optimizer).items():
        found["loaded", name] = pieces_of("", [(shard, values)])["", shard.name]
    return found
