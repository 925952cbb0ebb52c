"""Matrix products in float8, by torchao: linear layers are swapped for ones that scale and round their operands.

    tensorwise  one scale per operand; with FSDP the weights can be gathered in float8, half the bytes of bfloat16
    rowwise     one scale per row, a power of two: closer to the exact product, somewhat slower

Parameters stay in `precision.storage` and keep their names, so checkpoints do not depend on it. On a CPU the products are
emulated: operands are rounded to float8 and multiplied in float32. torchao is imported only where float8 is on.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from math import ceil

import torch
from torch import nn

from forge.config.layout import Precision
from forge.model import Experts
from forge.parallel.layout import Layout
from forge.parallel.modules import carry_hooks, count_hooks, has_all_names
from forge.parallel.tensor.local import LocalLinear
from forge.runtime.errors import UserError, did_you_mean
from forge.shard import local

log = logging.getLogger(__name__)

# Float8 kernels take matrices whose sides this number divides.
MULTIPLE = 16
# Compute capability of the first cards with float8 kernels: Ada; then Hopper, 9.0.
FIRST_CARD = (8, 9)


def apply_float8(model: nn.Module, layout: Layout) -> None:
    """Swap the linear layers of `model`, in place; those in `float8_exclude` or of a size that does not fit stay.

    Raises UserError if the device has no float8, no layer is left to convert, or a pattern in `float8_exclude` matches no
    module.
    """
    precision = layout.precision
    emulate = layout.meshes.fsdp.device_type == "cpu"
    if not emulate:
        _check_device(precision)
    check_patterns(model, precision.float8_exclude)
    chosen, left_out = choose_layers(model, precision.float8_exclude)
    gather = _gathers_in_float8(chosen, layout)
    _log_choice(precision.float8, gather, chosen, left_out)
    if any(isinstance(module, Experts) for module in model.modules()):
        log.info("not in float8: routed experts, which multiply groups of rows in precision.compute")
    if not chosen and not has_all_names(model):
        return
    if not chosen:
        raise UserError(
            f"precision.float8 = {precision.float8}: no linear layer is left to convert; "
            + ("; ".join(f"{name} {why}" for name, why in left_out.items()) or "the model has none")
        )
    with _quiet():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    recipe = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(precision.float8),
        emulate=emulate,
        enable_fsdp_float8_all_gather=gather,
    )
    hooks = count_hooks(model)
    convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: name in chosen)
    for name, layer in chosen.items():
        carry_hooks(layer, model.get_submodule(name))
    # Tensor parallelism lives in these hooks: without them every rank would silently compute a part for the whole.
    assert count_hooks(model) == hooks, "hooks were lost when linear layers were swapped"


def scale_refresher(model: nn.Module) -> Callable[[], None]:
    """Return a function to call after each change of the parameters of a sharded `model`. Collective when called.

    Where FSDP gathers weights in float8 it computes their scales, in one all-reduce for all of them; before the first
    call FSDP computes one per weight and forward, with the same result. Elsewhere it does nothing.
    """
    gathers = "enable_fsdp_float8_all_gather"
    if not any(getattr(getattr(module, "config", None), gathers, False) for module in model.modules()):
        return lambda: None
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    return functools.partial(precompute_float8_dynamic_scale_for_fsdp, model)


def choose_layers(model: nn.Module, exclude: tuple[str, ...]) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return the linear layers of `model` to convert, by name, and for all others the reason why not."""
    chosen: dict[str, nn.Linear] = {}
    left_out: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        # The matrix of this rank: under tensor parallelism a part of the weight.
        sides = tuple(local(module.weight).shape)
        pattern = next((pattern for pattern in exclude if fnmatchcase(name, pattern)), None)
        if pattern is not None:
            left_out[name] = f'is in precision.float8_exclude ("{pattern}")'
        elif isinstance(module, LocalLinear):
            left_out[name] = "computes on local tensors under tensor parallelism"
        elif any(side % MULTIPLE for side in sides):
            left_out[name] = f"is {sides[0]} x {sides[1]} on each rank, not multiples of {MULTIPLE}"
        else:
            chosen[name] = module
    return chosen, left_out


def _gathers_in_float8(chosen: dict[str, nn.Linear], layout: Layout) -> bool:
    """Whether FSDP gathers the chosen weights in float8."""
    wanted, parallel, mesh = layout.precision.float8_all_gather, layout.parallel, layout.meshes.fsdp
    if layout.precision.float8 != "tensorwise" or wanted is False:
        return False
    if wanted == "auto" and (parallel.data_parallel != "fsdp2" or parallel.tp > 1):
        return False
    # torchao takes the largest element of what each rank holds, and fails where a rank holds nothing.
    ranks = mesh.size(mesh.ndim - 1)
    empty = [name for name, layer in chosen.items() if _holders(layer.weight.shape[0], ranks) < ranks]
    if empty and wanted is True:
        raise UserError(
            f"precision.float8_all_gather = true needs rows of every matrix on all {ranks} ranks, and "
            f"{empty[0]} has too few; use auto or false"
        )
    return not empty


def _holders(rows: int, ranks: int) -> int:
    """How many of `ranks` hold rows when they are dealt out in equal chunks, the last ones shorter or empty."""
    return ceil(rows / ceil(rows / ranks))


def _check_device(precision: Precision) -> None:
    capability = torch.cuda.get_device_capability()
    if capability < FIRST_CARD:
        raise UserError(
            f"precision.float8 = {precision.float8} needs a card of compute capability "
            f"{FIRST_CARD[0]}.{FIRST_CARD[1]} (Ada, Hopper or later), this one has {capability[0]}.{capability[1]}; use none"
        )
    if precision.compute == "float64":
        raise UserError(
            "precision.float8 on a GPU computes in bfloat16 or float32, not precision.compute = float64"
        )


def check_patterns(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Raise UserError for a pattern that matches no module; the key's defaults may match none."""
    if not has_all_names(model):
        return
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if pattern not in Precision().float8_exclude and not any(
            fnmatchcase(name, pattern) for name in names
        ):
            raise UserError(
                f'precision.float8_exclude: "{pattern}" fits no module of this model{did_you_mean(pattern, names)}'
            )


def _log_choice(kind: str, gather: bool, chosen: dict[str, nn.Linear], left_out: dict[str, str]) -> None:
    kinds = Counter(name.rpartition(".")[2] for name in chosen)
    log.info(
        "float8 %s: %d of %d linear layers (%s), gathered in %s",
        kind,
        len(chosen),
        len(chosen) + len(left_out),
        ", ".join(f"{number} {name}" for name, number in kinds.items()) or "none",
        "float8" if gather else "precision.compute",
    )
    for name, why in left_out.items():
        log.info("not in float8: %s %s", name, why)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torchao while it is imported: it warns of missing extensions that forge does not use."""
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
