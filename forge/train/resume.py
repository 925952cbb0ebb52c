"""Where a run begins: at its newest usable checkpoint, at one the user names, from another model's weights, or afresh."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.checkpoint import Checkpoints, find_checkpoint, load, read_config, read_state
from forge.config import Config, difference, parse_toml_text
from forge.distributed import RanksFailed
from forge.errors import NO_CHECKPOINT, UserError
from forge.optim import Optimizer
from forge.parallel.model import ParallelModel
from forge.train.state import all_tensors, model_tensors

log = logging.getLogger(__name__)

# The shape of the model and the order of its data: with another value a resumed run would not continue its history.
FIXED = ("model.", "train.seq_len", "run.seed", "data.mixture_block", "data.document_mask")
# Say how a model starts, not what it is.
FREE = ("model.init_std",)


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run continues, and its JSON state."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["progress"]["step"])


def find_resume_point(config: Config, checkpoints: Checkpoints) -> ResumePoint | None:
    """The verified checkpoint that `checkpoint.resume` asks for, or None to start a new history. Collective.

    Raises UserError: exit 77 if checkpoints exist but none is usable, or the named one is not; exit 2 if the config
    changes what a resume must not change.
    """
    wanted = config.checkpoint.resume
    if wanted == "none":
        return None
    if wanted == "auto":
        step = checkpoints.latest(verify=config.checkpoint.verify)
        if step is None:
            return None
        path = checkpoints.path(step)
    else:
        path = Path(wanted)
        _require_sound(path, checkpoints, "checkpoint.resume", config.checkpoint.verify)
    point = ResumePoint(path, read_state(path))
    if "progress" not in point.state:
        raise UserError(
            f"checkpoint.resume = {wanted!r}: was imported, so it has weights only and no history to continue; begin a new "
            "one with checkpoint.init"
        )
    _compare(parse_toml_text(read_config(path), import_classes=False), config, path)
    return point


def _require_sound(path: Path, checkpoints: Checkpoints, key: str, verify: bool) -> None:
    try:
        problem = checkpoints.verify(path, contents=verify)
    except RanksFailed as error:
        problem = str(error)
    if problem is None:
        return
    if (path / "config.json").is_file():
        remedy = "scripts/convert.py from-hf makes a checkpoint of it"
        raise UserError(f"{key} = {str(path)!r}: is a folder of Hugging Face; {remedy}")
    try:
        newest = find_checkpoint(path)
    except UserError as error:
        raise UserError(f"{key} = {error}", exit_code=NO_CHECKPOINT) from None
    hint = "" if newest == path else f"; did you mean {str(newest)!r}?"
    raise UserError(f"{key} = {str(path)!r}: {problem}{hint}", exit_code=NO_CHECKPOINT)


def _compare(old: Config, new: Config, path: Path) -> None:
    changes = difference(old, new)
    refused = [
        f"  {key}: {before!r} in the checkpoint, {after!r} now"
        for key, before, after in changes
        if key.startswith(FIXED) and not key.startswith(FREE)
    ]
    if refused:
        lines = "\n".join(refused)
        raise UserError(
            f"{path} cannot be continued with another model or data order:\n{lines}\n"
            f"Set them back, or start a new run (another run.name) with checkpoint.init = {str(path)!r} to keep the weights."
        )
    for key, before, after in changes:
        log.info("changed since %s: %s = %s (was %s)", path.name, key, after, before)


def check_data(point: ResumePoint, inputs: dict[str, Any], allow_changed_data: bool = False) -> list[str]:
    """Refuse to continue on other data or with another tokenizer than the checkpoint's (UserError, exit 2).

    With `allow_changed_data` other data are taken; returns what of them has changed, one sentence each.
    """
    before = point.state["inputs"]
    changes = []
    for key in sorted(set(before) | set(inputs)):
        there, now = before.get(key), inputs.get(key)
        if there == now:
            continue
        changes.append(f"{key} is not what {point.path} was trained on: fingerprint {there} there, {now} now")
        # With another tokenizer the same ids mean something else.
        free = key.startswith("data.sources")
        if not (allow_changed_data and free):
            remedy = ", set checkpoint.allow_changed_data = true to read these from here on" if free else ""
            raise UserError(
                f"{changes[-1]}. Restore the files and data.sources{remedy}, or start a new run (another run.name) with "
                f"checkpoint.init = {str(point.path)!r} to keep the weights."
            )
    for change in changes:
        log.warning("%s", change)
    return changes


def load_training_state(point: ResumePoint, model: ParallelModel, optimizer: Optimizer) -> None:
    """Overwrite parameters and optimizer state with the checkpoint's. Collective."""
    load(point.path, all_tensors(model, optimizer))
    model.after_update()
    optimizer.load_state(point.state["optimizer"])


def load_weights(config: Config, model: ParallelModel, checkpoints: Checkpoints) -> None:
    """Overwrite parameters only with those of the checkpoint that `checkpoint.init` names. Collective."""
    path = Path(config.checkpoint.init)
    _require_sound(path, checkpoints, "checkpoint.init", config.checkpoint.verify)
    load(path, model_tensors(model))
    model.after_update()
