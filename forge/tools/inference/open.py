"""Open a checkpoint in one process for inference, with weights in their compute dtypes and without optimizer state."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint import find_checkpoint, find_damage, load, trained_config
from forge.checkpoint.folders import step_name, steps
from forge.checkpoint.loading import TensorReader, compare, refuse_misfits
from forge.checkpoint.manifest import MANIFEST, Damaged, read_manifest
from forge.config import Config
from forge.config.extensions import require_trust
from forge.data.tokenizer import Tokenizer, load_tokenizer
from forge.parallel.build import build_meta_model
from forge.parallel.float8 import compute_in_float8
from forge.parallel.precision import DTYPES, cast_at_borders, plan_units
from forge.runtime.causes import Cause
from forge.runtime.distributed import RanksFailed, single_process_group
from forge.runtime.errors import NO_CHECKPOINT, UserError
from forge.shard import Shard

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedModel:
    """The model of the checkpoint at `path`, saved after step `step`. tokenizer: None if the run had no tokenizer."""

    path: Path
    step: int
    config: Config
    model: Any
    tokenizer: Tokenizer | None
    device: torch.device


def open_checkpoint(
    path: str | Path,
    device: torch.device,
    *,
    compute: str | None = None,
    context: int | None = None,
    verify: bool = True,
    trust: bool = False,
    float8: bool = False,
) -> TrainedModel:
    """Open the newest intact checkpoint at `path`: a run directory, its folder of checkpoints, or a single checkpoint.

    A damaged checkpoint is skipped with a warning and left unchanged. If the run removes a checkpoint during the call, a
    newer one is opened. Routing has no noise and no capacity limit.

    compute: overrides precision.compute, e.g. "float32". context: overrides train.seq_len, in tokens. verify: if False,
    check tensor files only by name and size. trust: allow the import of a class named by model.kind. float8: if True,
    compute with the run's float8 keys, emulated if the hardware lacks kernels. If False, compute in precision.compute.

    Raises UserError with exit code 2 if there is no checkpoint, if its config is invalid or needs trust, or if float8 is
    requested for a run without float8. Raises UserError with exit code 77 if no checkpoint is intact.
    """
    while True:
        found = _find_undamaged(Path(path), verify)
        try:
            return _open(found, device, compute, context, trust, float8)
        except (UserError, OSError, Damaged):
            if _is_there(found) or found == Path(path):
                raise
            message = "%s was removed by its run while it was read; reading a newer one"
            log.warning(message, found, extra=Cause.NOTE.mark)


def _is_there(checkpoint: Path) -> bool:
    """Return whether the checkpoint is complete. A run removes the manifest first."""
    return (checkpoint / MANIFEST).is_file()


def _open(
    found: Path, device: torch.device, compute: str | None, context: int | None, trust: bool, float8: bool
) -> TrainedModel:
    """Open the verified checkpoint `found`; arguments and errors as in `open_checkpoint`."""
    try:
        config = trained_config(found)
    except OSError as error:
        raise UserError(f"checkpoint {found}: {error.filename} cannot be read: {error.strerror}") from None
    if not trust:
        require_trust(config, str(found / "config.toml"), ["model.kind"])
    config = _for_inference(config, compute, context)
    if float8 and config.precision.float8 == "none" and not config.precision.float8_dispatch:
        raise UserError(f"--float8: {found} was trained with precision.float8 = none; leave out --float8")
    model = _build(config, device, found, float8=float8)
    with single_process_group():
        state = model.state_dict()
        load(found, {f"model.{name}": (Shard.whole(name, values), values) for name, values in state.items()})
    folder = found / "tokenizer"
    tokenizer = load_tokenizer(folder) if folder.is_dir() else None
    return TrainedModel(found, read_manifest(found)["step"], config, model, tokenizer, device)


def _find_undamaged(path: Path, verify: bool) -> Path:
    if os.path.isfile(path / "config.json") and not (path / MANIFEST).exists():
        raise UserError(
            f"{path}: is a model in the format of transformers; convert it with "
            f"scripts/convert.py from-hf --input {path} --output FOLDER"
        )
    newest = find_checkpoint(path)
    candidates = [newest]
    if newest != path:
        candidates = [newest.parent / step_name(step) for step in reversed(steps(newest.parent))]
    problems, removed = [], False
    for candidate in candidates:
        try:
            with single_process_group():
                damage = find_damage(candidate, contents=verify)
            if damage is not None:
                raise Damaged(damage)
            TensorReader(candidate).index()
            return candidate
        except Damaged as error:
            if candidate != path and not _is_there(candidate):
                removed = True
                continue
            problems.append(f"checkpoint {candidate} is damaged: {error}")
        except RanksFailed as error:
            problems.append(f"checkpoint {candidate}: {error}")
        if len(candidates) > len(problems):
            log.warning("%s; using an older checkpoint", problems[-1], extra=Cause.FALLBACK.mark)
    if removed:
        return _find_undamaged(path, verify)  # the run has removed a checkpoint, so it has saved a newer one
    raise UserError("; ".join(problems), NO_CHECKPOINT)


def _for_inference(config: Config, compute: str | None, context: int | None) -> Config:
    model = config.model
    if model.moe is not None:
        # With a capacity limit, the dropped tokens would depend on the other texts of the batch, and so would a
        # generated text.
        exact = model.moe.model_copy(update={"capacity_factor": 0.0, "router_noise": 0.0})
        model = model.model_copy(update={"moe": exact})
    precision = config.precision.model_copy(update={"compute": compute} if compute else {})
    train = config.train.model_copy(update={"seq_len": context} if context else {})
    return config.model_copy(update={"model": model, "precision": precision, "train": train})


def _build(config: Config, device: torch.device, found: Path, *, float8: bool) -> Any:
    """Return the model with uninitialised weights, each in the dtype in which training computes with it.

    float8: compute matrix products in `precision.float8`. Raises UserError, before any allocation, if the tensors and the
    config of the checkpoint `found` do not match.
    """
    index = TensorReader(found).index()
    if config.model.n_layers > len(index.state_dict_metadata):
        raise UserError(
            f"{found}: config.toml has model.n_layers = {config.model.n_layers}, but the checkpoint has only "
            f"{len(index.state_dict_metadata)} tensors; config.toml is not the file of this checkpoint"
        )
    model = build_meta_model(config)
    state = {
        f"model.{name}": (Shard.whole(name, values), values) for name, values in model.state_dict().items()
    }
    refuse_misfits(found, index, [compare(index, state)], ())
    if float8:
        compute_in_float8(model, config.precision, device.type)
    compute = DTYPES[config.precision.compute]
    _, dtypes = plan_units(model, config.precision)
    cast_at_borders(model, dtypes, compute)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtypes[parameter])
    model.to_empty(device=device)
    model.reset_buffers(compute)
    return model.eval().requires_grad_(False)
