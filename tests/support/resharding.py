"""Train part of a run under one layout, between checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from forge.checkpoint import Checkpoints
from forge.config import check_world, parse_toml_text
from forge.optim import build_optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.mesh import make_meshes
from forge.run.restore import load_training_state
from forge.run.resume import ResumePoint
from forge.tools.verify.record import Settings, make_step
from forge.train.state import all_tensors
from tests.support.equivalence import STEPS, config_batches, wholes

SAVED_AFTER, LR = 2, 1e-2


def train_part(
    rank: int, world: int, text: str, folder: str, begin: int, end: int
) -> dict[str, list[float] | dict]:
    """Train steps begin + 1 to end. Return the steps' losses and all final parameters.

    Unless begin is 0, load a checkpoint first. Unless these are the last steps, save a checkpoint at the end.
    """
    config = parse_toml_text(text)
    meshes = make_meshes(check_world(config, world), "cpu")
    model = build_parallel_model(config, meshes, torch.device("cpu"))
    optimizer = build_optimizer(model.shards, config.optimizer, meshes.stage)
    checkpoints = Checkpoints(Path(folder), mode="sync")
    if begin:
        for shard in model.shards:
            shard.data.fill_(float("nan"))
        state = {"progress": {"step": begin}, "optimizer": {"updates": begin}}
        load_training_state(ResumePoint(checkpoints.path(begin), state), model, optimizer)
    losses = []
    for step, batch in enumerate(config_batches(config, meshes.data_rank, meshes.data_ranks)):
        if not begin <= step < end:
            continue
        made = make_step(model, optimizer, batch, step + 1, Settings(lr=LR))
        losses.append(made.pieces["loss", "cross-entropy"][0].values.item())
    if end < STEPS:
        (outcome,) = checkpoints.save(end, all_tensors(model, optimizer), optimizer.state(), {}, {})
        assert outcome.error is None, outcome.error
    return {"losses": losses, "parameters": wholes(model.shards, [s.data for s in model.shards])}
