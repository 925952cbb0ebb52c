"""Compare the run's configuration with that of its starting checkpoint, and accept or refuse each difference."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from forge.checkpoint import read_state, saved_config, trained_config
from forge.checkpoint.folders import step_name, steps
from forge.config import Config, difference
from forge.config.data import used_sources
from forge.config.phases import with_steps
from forge.optim import decay_start, learning_rate
from forge.runtime.causes import Cause
from forge.runtime.errors import UserError

log = logging.getLogger(__name__)

# Keys of the model's shape and the data order. With another value, a resumed run would not continue its history.
FIXED = ("model.", "train.seq_len", "run.seed", "data.mixture_block", "data.document_mask")
# Keys of [model] that affect training but not the function computed by the weights.
TRAINING = (
    *("model.init_std", "model.linear_attention.chunk_size", "model.mtp.loss_coef"),
    *(f"model.moe.{key}" for key in ("balance", "aux_loss_coef", "z_loss_coef", "bias_update_rate")),
    *(f"model.moe.{key}" for key in ("router_noise", "capacity_factor")),
)
# Keys of FIXED sections that may nevertheless change on resume.
FREE = ("model.init_std", "model.linear_attention.chunk_size")
# These keys change the names or shapes of tensors. Loading the tensors reports such differences.
SHAPES = (
    *("model.dim", "model.n_layers", "model.ffn_dim", "model.vocab_size"),
    *("model.tie_embeddings", "model.qk_norm", "model.attention_bias"),
    *("model.attention_output_bias", "model.ffn_bias", "model.qk_norm_over"),
    *(
        f"model.moe.{key}"
        for key in ("n_experts", "n_shared_experts", "expert_dim", "n_dense_layers", "every")
    ),
    *("model.moe.expert_bias", "model.moe.router_bias"),
)
# Attention windows and position encoding. Further training adapts the weights to a longer context.
CONTEXT = (
    *("model.rope_theta", "model.rope_scaling.", "model.sliding_window", "model.sliding_rope_theta"),
    "model.layer_pattern",
)


def compare_for_resume(
    path: Path, step: int, new: Config, branch: bool = False, shared: Path | None = None
) -> None:
    """Log the keys that changed since the checkpoint at `path`.

    Raises UserError for a change that prevents the run from continuing. branch: True if checkpoint.resume names this
    checkpoint. shared: folder of the run's checkpoints, if `path` is a node-local state; else None.
    """
    old, new = (_continued(config, path) for config in (saved_config(path), new))
    if branch:
        _refuse_a_past_decay(path, step, old, new)
    changes = difference(old, new)
    refused = [change for change in changes if change[0].startswith(FIXED) and change[0] not in FREE]
    if refused:
        raise UserError(
            f"{path} cannot be continued with another model or data order:\n{_lines(refused)}\n"
            f"Set them back, or {_new_run(path, shared)}.",
            cause=Cause.CHANGED_SETTINGS,
        )
    for key, before, after in changes:
        log.info("changed since %s: %s = %s (was %s)", path.name, key, after, before)
    _warn_of_jump(shared or path.parent, step, old, new)


def compare_for_init(path: Path, new: Config) -> None:
    """Log the keys of [model] that differ from those of the checkpoint at `path`, which gives the initial weights.

    Raises UserError for a difference that changes the function computed by the weights, unless
    `checkpoint.init_changes` lists the key.
    """
    changes = [change for change in difference(trained_config(path), new) if change[0].startswith("model.")]
    free = (*TRAINING, *CONTEXT, *SHAPES)
    meant = new.checkpoint.init_changes
    if refused := [change for change in changes if not change[0].startswith(free) and change[0] not in meant]:
        names = ", ".join(f'"{key}"' for key, _, _ in refused)
        raise UserError(
            f"checkpoint.init = {str(path)!r}: the model differs from the one these weights were trained with:\n"
            f"{_lines(refused)}\n"
            f"Set them to the checkpoint's values, or, if the change is intended, list them: "
            f"checkpoint.init_changes = [{names}].",
            cause=Cause.CHANGED_SETTINGS,
        )
    for key, before, after in changes:
        message = "checkpoint.init: %s = %s, the weights were trained with %s"
        log.warning(message, key, after, before, extra=Cause.NOTE.mark)


def check_data(
    path: Path, before: dict[str, Any], inputs: dict[str, Any], new: Config, shared: Path | None = None
) -> list[str]:
    """Compare data and tokenizer with those of the checkpoint at `path`. Return one sentence per accepted change.

    before, inputs: fingerprints in the checkpoint and now. new: the run's config. shared: see `compare_for_resume`.

    With `checkpoint.allow_changed_data`, changed data are accepted, but not a changed tokenizer. Raises UserError (exit 2)
    for any other change.
    """
    changed = [key for key in sorted(set(before) | set(inputs)) if before.get(key) != inputs.get(key)]
    if not changed:
        return []
    old = saved_config(path)
    changes: list[str] = []
    for key in changed:
        # A changed tokenizer is never accepted, because it changes the meaning of ids. A changed data.mixture_block is
        # accepted, because small weights make blocks larger (data/order.py).
        free = key.startswith("data.sources") or key == "data.mixture_block"
        for name, there, now in _as_written(key, before.get(key), inputs.get(key), old, new):
            change = f"{name} differs from {path}: {there} in the checkpoint, {now} now"
            if not (new.checkpoint.allow_changed_data and free):
                back = (
                    f"Set {name} back" if "fingerprint" not in there else "Restore the files and data.sources"
                )
                remedy = (
                    ", set checkpoint.allow_changed_data = true to read the new data from here on"
                    if free
                    else ""
                )
                raise UserError(
                    f"{change}. {back}{remedy}, or {_new_run(path, shared)}.", cause=Cause.CHANGED_DATA
                )
            if change not in changes:
                changes.append(change)
    for change in changes:
        log.warning("%s", change, extra=Cause.CHANGED_DATA.mark)
    return changes


def _new_run(path: Path, shared: Path | None) -> str:
    """Return the advice to start a new run with the weights of the checkpoint at `path`.

    shared: see `compare_for_resume`. checkpoint.init cannot load a node-local state, so the advice names the newest
    checkpoint in `shared`.
    """
    if shared is not None and not (saved := steps(shared)):
        return "start a new run (another run.name); the run has no checkpoint for checkpoint.init"
    newest = path if shared is None else shared / step_name(saved[-1])
    return f"start a new run (another run.name) with checkpoint.init = {str(newest)!r} to keep the weights"


def _as_written(key: str, there: object, now: object, old: Config, new: Config) -> list[tuple[str, str, str]]:
    """Translate a changed fingerprint to keys of the config. Return (key, old value, new value) of each key.

    key, there, now: a key of `input_fingerprints` (forge/data/build.py), with its values in the checkpoint and now.
    Fingerprints differ from the config in two ways: weight and max_epochs are computed from several keys, and the index
    in data.sources[i] counts only the sources in use.
    """
    source = re.fullmatch(r"data\.sources\[(\d+)\]\.(path|weight|max_epochs)", key)
    if source is None:
        kind = "fingerprint " if key == "data.tokenizer" else ""
        return [(key, f"{kind}{there}", f"{kind}{now}")]
    number, field = int(source[1]), source[2]
    if field == "path" and old.data.packing != new.data.packing:
        return [("data.packing", old.data.packing, new.data.packing)]
    if field == "path":
        config = new if number < len(used_sources(new)) else old
        name = f"data.sources[{used_sources(config)[number]}].path"
        return [(name, f"fingerprint {there}", f"fingerprint {now}")]
    if number >= min(len(used_sources(old)), len(used_sources(new))):
        return []  # added and removed sources are reported by path
    was, is_now = (config.data.sources[used_sources(config)[number]] for config in (old, new))
    name = f"data.sources[{used_sources(new)[number]}].{field}"
    written = [
        (name, getattr(was, field), getattr(is_now, field)),
        ("data.temperature", old.data.temperature, new.data.temperature),
        ("data.on_max_epochs", old.data.on_max_epochs, new.data.on_max_epochs),
    ]
    differ = [one for one in written if one[1] != one[2]]
    computed = (f"{name} (computed with data.temperature and the size of the source)", there, now)
    return [(name, _shown(was), _shown(is_now)) for name, was, is_now in differ or [computed]]


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _continued(config: Config, path: Path) -> Config:
    """Return `config` with the `train.steps` of a run that continues the checkpoint at `path`."""
    if not config.train.tokens:
        return config
    progress = read_state(path)["progress"]
    return with_steps(config, progress["step"], progress["tokens"])


def _lines(changes: list[tuple[str, object, object]]) -> str:
    return "\n".join(
        f"  {key}: {before!r} in the checkpoint, {after!r} now" for key, before, after in changes
    )


def _refuse_a_past_decay(path: Path, step: int, old: Config, new: Config) -> None:
    """Raise UserError if `step` is before the decay of the old schedule, but already in the decay of the new schedule."""
    if new.schedule.name != "wsd" or new.schedule.unit == "tokens":
        return
    start, before = decay_start(new.schedule, new.train.steps), decay_start(old.schedule, old.train.steps)
    if start < step <= before and step < new.train.steps:
        share = (new.train.steps - step) / new.train.steps
        raise UserError(
            f"checkpoint.resume = {str(path)!r}: step {step} was trained on the plateau of the learning rate, but with "
            f"train.steps = {new.train.steps} the decay begins after step {start}; resume from a checkpoint up to step "
            f"{start}, raise train.steps, or set schedule.decay_fraction = {share:.3g}, which decays from step {step} on",
            cause=Cause.CHANGED_SETTINGS,
        )


def _warn_of_jump(folder: Path, step: int, old: Config, new: Config) -> None:
    """Warn if the learning rate had begun to decay and would now rise again, e.g. because train.steps was raised.

    folder: the folder with the checkpoints before `step`.
    """
    if step >= new.train.steps:
        return  # no further step
    start = decay_start(old.schedule, old.train.steps)
    last, following = (
        learning_rate(config.schedule, lr=config.optimizer.lr, step=number, steps=config.train.steps)
        for config, number in ((old, step), (new, step + 1))
    )
    if step <= start or following <= 1.01 * last:
        return
    before = [number for number in steps(folder) if number <= start]
    remedy = f"the last checkpoint before the decay is {folder / step_name(before[-1])}" if before else ""
    log.warning(
        "the learning rate jumps from %.3g in step %d to %.3g in step %d: it had decayed since step %d; %s",
        last,
        step,
        following,
        step + 1,
        start,
        remedy or "no checkpoint before the decay is left",
        extra=Cause.NOTE.mark,
    )
