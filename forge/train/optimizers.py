"""The optimizer of a run, and loading its state, which has to be of its kind."""

from __future__ import annotations

import logging
from pathlib import Path

from forge.checkpoint import load
from forge.checkpoint.loading import TensorReader
from forge.config.schema import OptimizerConfig
from forge.distributed import RanksFailed, on_every_rank, on_first_rank
from forge.errors import NO_CHECKPOINT, UserError
from forge.optim import Optimizer, build_optimizer
from forge.parallel.mesh import Meshes
from forge.parallel.model import ParallelModel
from forge.train.resume import ResumePoint
from forge.train.state import all_tensors, model_tensors

log = logging.getLogger(__name__)


def make_optimizer(config: OptimizerConfig, model: ParallelModel, meshes: Meshes) -> Optimizer:
    """The optimizer of this rank's shards, at its start. Collective.

    Raises UserError on every rank if a stage has parameters that it cannot update.
    """
    return on_every_rank("making the optimizer", lambda: build_optimizer(model.shards, config, meshes.stage))


def load_training_state(
    point: ResumePoint, model: ParallelModel, optimizer: Optimizer, name: str | None = None
) -> bool:
    """Overwrite parameters and optimizer state with the checkpoint's. Collective.

    False if its optimizer state is of another kind than `optimizer`, of this name: make a new one then.
    """
    same = _is_same_kind(point.path, point.state.get("optimizer_name"), optimizer, name)
    load(point.path, all_tensors(model, optimizer) if same else model_tensors(model))
    model.after_update()
    if same:
        optimizer.load_state(point.state["optimizer"])
    return same


def _is_same_kind(path: Path, saved_name: str | None, optimizer: Optimizer, name: str | None) -> bool:
    """Return whether the checkpoint at `path` has optimizer state of the kind of `optimizer`; log it if not. Collective.

    That is, of the same name (None: not compared) and with the same slots. Raises UserError (exit 77) if the checkpoint
    cannot be read.
    """

    def slots() -> set[str]:
        saved = TensorReader(path).tensors()
        return {tensor.rpartition(".")[2] for tensor in saved if tensor.startswith("optimizer.")}

    try:
        there = on_first_rank("reading the index", slots)
    except RanksFailed as error:
        raise UserError(f"checkpoint {path} cannot be loaded: {error}", NO_CHECKPOINT) from error
    # Every stage of a pipeline has some of all slots; even if not, the first rank decides for all.
    here = on_first_rank("comparing optimizers", lambda: {slot for slot, _, _ in optimizer.tensors()})
    before = saved_name or name
    if (before, there) == (name or before, here):
        return True
    old, new = _describe(before, there), _describe(name, here)
    log.warning("%s has optimizer state of %s; that of %s starts afresh", path.name, old, new)
    return False


def _describe(name: str | None, slots: set[str]) -> str:
    return f"{name or 'the optimizer'} ({', '.join(sorted(slots)) or 'no tensors'})"
