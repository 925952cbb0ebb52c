"""Load the weights or the whole training state of a checkpoint into a built model."""

from __future__ import annotations

import logging
from pathlib import Path

from forge.checkpoint import load
from forge.checkpoint.loading import TensorReader
from forge.optim import Optimizer
from forge.parallel.step.model import ParallelModel
from forge.run.resume import ResumePoint
from forge.runtime.causes import Cause
from forge.runtime.distributed import RanksFailed, gather_from_ranks, on_first_rank
from forge.runtime.errors import NO_CHECKPOINT, UserError
from forge.train.state import all_tensors, model_tensors

# Optimizer slots that may start from initial values while other slots continue: the weight average, and NorMuon's row
# moments, whose common scale has no effect. AdamW's moments may not start alone, because their bias correction depends
# on the number of updates since the moments were zero.
STARTS_ALONE = {"ema", "row_moment"}
log = logging.getLogger(__name__)


def load_weights(path: Path, model: ParallelModel) -> None:
    """Load only the parameters from the verified checkpoint at `path`. Collective."""
    load(path, model_tensors(model))
    model.after_update()


def load_training_state(
    point: ResumePoint, model: ParallelModel, optimizer: Optimizer, name: str | None = None
) -> bool:
    """Load parameters and optimizer state from the checkpoint. Collective.

    name: name of `optimizer`; None: not compared. A slot is one kind of optimizer tensor, e.g. `ema`. A slot in
    STARTS_ALONE starts from zeros if the checkpoint lacks it, and is ignored if the optimizer lacks it. If the checkpoint
    has the state of another kind of optimizer, load only the parameters and return False; the caller must then build a
    new optimizer. Otherwise return True.
    """
    fresh = _fresh_slots(point.path, point.state.get("optimizer_name"), optimizer, name)
    if fresh is None:
        load(point.path, model_tensors(model), fetch=point.fetch)
        model.after_update()
        return False
    for slot, _, values in optimizer.tensors():
        if slot in fresh:
            values.zero_()
    names = all_tensors(model, optimizer)
    there = {name: of_name for name, of_name in names.items() if _slot(name) not in fresh}
    load(point.path, there, unused=STARTS_ALONE - fresh, fetch=point.fetch)
    model.after_update()
    optimizer.load_state(point.state["optimizer"])
    return True


def _slot(name: str) -> str | None:
    """Return the slot in an optimizer tensor's name; None for a model tensor."""
    return name.rpartition(".")[2] if name.startswith("optimizer.") else None


def _fresh_slots(
    path: Path, saved_name: str | None, optimizer: Optimizer, name: str | None
) -> set[str] | None:
    """Return the slots of `optimizer` that the checkpoint at `path` lacks. Collective.

    Return None if the checkpoint has the state of another kind of optimizer: its name differs (`name` None: not compared),
    or its slots differ by more than STARTS_ALONE. Logs ignored state. Raises UserError (exit 77) if the checkpoint cannot
    be read.
    """

    def slots() -> set[str]:
        return {slot for tensor in TensorReader(path).tensors() if (slot := _slot(tensor)) is not None}

    try:
        there = on_first_rank("reading the index", slots)
    except RanksFailed as error:
        raise UserError(f"checkpoint {path} cannot be loaded: {error}", NO_CHECKPOINT) from error
    # Of all ranks, because a pipeline stage may lack slots. A stage with only the embedding has no matrix for Muon.
    own = gather_from_ranks("comparing optimizers", lambda: {slot for slot, _, _ in optimizer.tensors()})
    here = set().union(*own)
    before = saved_name or name
    if before != (name or before) or (there ^ here) - STARTS_ALONE:
        old, new = _describe(before, there), _describe(name, here)
        message = "%s has the optimizer state of %s, which is not loaded; the state of %s starts from its initial values"
        log.warning(message, path.name, old, new, extra=Cause.NOTE.mark)
        return None
    if fresh := here - there:
        message, names = (
            "%s lacks the optimizer state %s, which starts from its initial values",
            ", ".join(sorted(fresh)),
        )
        log.warning(message, path.name, names, extra=Cause.NOTE.mark)
    return fresh


def _describe(name: str | None, slots: set[str]) -> str:
    return f"{name or 'the optimizer'} ({', '.join(sorted(slots)) or 'no tensors'})"
