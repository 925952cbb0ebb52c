"""Matrix products in float8: choose the linear layers and experts, and GPU kernels or emulation.

    tensorwise  one scale per operand; FSDP can gather weights in float8, half the bytes of bfloat16
    rowwise     one scale per row, a power of two: closer to the exact product, somewhat slower
    blockwise   one scale per 128 activations or gradients, and one per 128 x 128 weights (formats.py)
    mxfp8       one scale per 32 values, a power of two (formats.py)

torchao computes the first two recipes (torchao.py). The two block formats also convert routed experts. Parameters stay
in `precision.storage` and keep their names, so checkpoints do not depend on the recipe. If the hardware has no kernel,
the products are emulated: operands are rounded to float8 and multiplied in a wider format.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import DTensor

from forge.config.float8 import cut_block
from forge.config.layout import Precision
from forge.model import Experts
from forge.model.linear_attention import Narrow
from forge.parallel.float8.formats import FORMATS, Format
from forge.parallel.float8.gathering import gather_in_blocks, may_gather_in_blocks
from forge.parallel.float8.hardware import missing_kernels, products_for
from forge.parallel.float8.layers import convert_experts, convert_linear
from forge.parallel.float8.rows import send_in_float8
from forge.parallel.float8.torchao import convert_with_torchao, gathers_in_float8
from forge.parallel.layout import Layout
from forge.parallel.modules import count_hooks, has_all_names
from forge.parallel.tensor.local import LocalLinear, LocalNarrow
from forge.runtime.causes import Cause
from forge.runtime.errors import UserError, did_you_mean
from forge.shard import local

log = logging.getLogger(__name__)

# Both sides of a matrix must be multiples of this number for torchao's products.
MULTIPLE = 16


def apply_float8(model: nn.Module, layout: Layout) -> None:
    """Convert the linear layers of `model`, and with a block format its routed experts, to float8 products, in place.

    With `float8_dispatch`, also round the rows of each dispatch. Layers in `float8_exclude` and layers of unsuitable size
    stay in precision.compute; the log names them.

    Raises UserError if a pattern in `float8_exclude` matches no module, if no layer is left to convert, or if tensor
    parallelism cuts a block. With float8_emulate = false, also if the hardware has no kernel.
    """
    precision = layout.precision
    if precision.float8_dispatch:
        send_in_float8(model)
    if precision.float8 == "none":
        return
    emulate = emulates(precision, layout.meshes.fsdp.device_type)
    check_patterns(model, precision.float8_exclude)
    chosen, left_out = choose_layers(model, precision)
    experts = choose_experts(model, precision)
    # The configuration is checked before, but a user's model may have experts without [model.moe].
    if experts and precision.float8 == "blockwise" and precision.float8_emulate is False:
        raise UserError(
            "precision.float8_emulate = false: no GPU has a kernel for routed experts in blockwise; use auto, which emulates "
            "their products, or set precision.float8_experts = false"
        )
    form = FORMATS.get(precision.float8)
    gather = form is None and gathers_in_float8(chosen, layout)
    _log_choice(precision.float8, gather, chosen, left_out)
    _log_experts(model, experts, precision)
    if not chosen and not experts and not has_all_names(model):
        return
    if not chosen and not experts:
        raise UserError(
            f"precision.float8 = {precision.float8}: no linear layer is left to convert; "
            + ("; ".join(f"{name} {why}" for name, why in left_out.items()) or "the model has none")
        )
    if form is None:
        convert_with_torchao(model, chosen, precision.float8, emulate=emulate, gather=gather)
    else:
        _refuse_cut_blocks(chosen, form, layout.parallel.tp)
        convert(model, chosen, experts, form, emulate=emulate)
        _gather(model, chosen, experts, form, layout)


def _gather(
    model: nn.Module, layers: Iterable[str], experts: Iterable[str], form: Format, layout: Layout
) -> None:
    """Make FSDP2 gather weights as codes of `form` where possible, and log the number of these weights.

    Raises UserError if float8_all_gather is true and no weight can be gathered in float8.
    """
    weights = {f"{name}.weight": (model.get_submodule(name), "weight") for name in layers}
    weights |= {
        f"{name}.{leaf}": (model.get_submodule(name), leaf) for name in experts for leaf in ("w13", "w2")
    }
    taken = gather_in_blocks(weights, form, layout)
    # A pipeline stage may have no such weight, but the layout is the same for all stages.
    refused = not taken and (has_all_names(model) or not may_gather_in_blocks(form, layout))
    if refused and layout.precision.float8_all_gather is True:
        raise UserError(
            "precision.float8_all_gather = true: no weight can be gathered in float8; use auto or false. The gather needs "
            "fsdp2 over several ranks, tp = 1, ep = 1, compile.enabled = false, no number as reshard_after_forward (for "
            "mxfp8 only always, or auto with pp = 1, and no recomputation), and a "
            f"weight whose shards consist of whole blocks of {form.block}"
        )
    if layout.parallel.data_parallel == "fsdp2":
        log.info(
            "float8 %s: FSDP2 gathers %d of %d weights as float8 codes and scales",
            form.name,
            len(taken),
            len(weights),
        )


def compute_in_float8(model: nn.Module, precision: Precision, device_type: str) -> None:
    """Make `model` compute its matrix products in `precision.float8`, in place. The model must not be distributed.

    Raises UserError if the hardware has no kernel and float8_emulate is false.
    """
    if precision.float8_dispatch:
        send_in_float8(model)
    if precision.float8 == "none":
        return
    emulate = emulates(precision, device_type)
    chosen, experts = choose_layers(model, precision)[0], choose_experts(model, precision)
    if form := FORMATS.get(precision.float8):
        convert(model, chosen, experts, form, emulate=emulate)
    else:
        convert_with_torchao(model, chosen, precision.float8, emulate=emulate, gather=False)


def convert(
    model: nn.Module, layers: Iterable[str], experts: dict[str, Experts], form: Format, *, emulate: bool
) -> None:
    """Convert the linear layers named in `layers`, and `experts`, to products in `form`, in place."""
    products = products_for(form, emulate=emulate)
    hooks = count_hooks(model)
    for name in layers:
        convert_linear(model, name, products)
    for module in experts.values():
        convert_experts(module, products)
    # Tensor parallelism lives in these hooks. Without them, every rank would silently treat its part as the whole.
    assert count_hooks(model) == hooks, "hooks were lost when linear layers were swapped"


def emulates(precision: Precision, device_type: str) -> bool:
    """Return whether products are emulated. Raises UserError if emulation is needed and float8_emulate is false."""
    if precision.float8_emulate is True:
        return True
    missing = missing_kernels(precision, device_type)
    if not missing:
        return False
    if precision.float8_emulate is False:
        raise UserError(
            f"precision.float8_emulate = false: {missing}; use auto, which emulates the products, or set "
            "precision.float8 = none"
        )
    if device_type != "cpu":
        message = "precision.float8 is emulated, because %s. Emulation is slower than precision.float8 = none"
        log.warning(message, missing, extra=Cause.NOTE.mark)
    return True


def choose_layers(model: nn.Module, precision: Precision) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Choose the linear layers of `model` to convert.

    Return two dicts: name -> layer to convert, and name -> reason why a layer is not converted.
    """
    chosen: dict[str, nn.Linear] = {}
    left_out: dict[str, str] = {}
    padded = precision.float8 in FORMATS
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        # This rank's matrix; under tensor parallelism, part of the weight.
        sides = tuple(local(module.weight).shape)
        pattern = next((pattern for pattern in precision.float8_exclude if fnmatchcase(name, pattern)), None)
        if pattern is not None:
            left_out[name] = f'is in precision.float8_exclude ("{pattern}")'
        elif padded and isinstance(module, Narrow | LocalNarrow):
            left_out[name] = "has gradients that are summed over ranks under tensor parallelism"
        elif padded:
            chosen[name] = module
        elif isinstance(module, LocalLinear):
            left_out[name] = "computes on local tensors under tensor parallelism"
        elif any(side % MULTIPLE for side in sides):
            left_out[name] = (
                f"has sides {sides[0]} x {sides[1]} on each rank, which are not multiples of {MULTIPLE}"
            )
        else:
            chosen[name] = module
    return chosen, left_out


def choose_experts(model: nn.Module, precision: Precision) -> dict[str, Experts]:
    """Return the routed experts of `model` to convert, by name."""
    if precision.float8 not in FORMATS or precision.float8_experts is False:
        return {}
    found = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    return {
        name: module
        for name, module in found.items()
        if not any(fnmatchcase(name, pattern) for pattern in precision.float8_exclude)
    }


def check_patterns(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Raise UserError for a pattern that matches no module.

    Default patterns may match nothing. A pipeline stage is not checked.
    """
    if not has_all_names(model):
        return
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if pattern not in Precision().float8_exclude and not any(
            fnmatchcase(name, pattern) for name in names
        ):
            raise UserError(
                f'precision.float8_exclude: "{pattern}" matches no module of this model{did_you_mean(pattern, names)}'
            )


def _refuse_cut_blocks(layers: dict[str, nn.Linear], form: Format, tp: int) -> None:
    """Raise UserError if tensor parallelism cuts a block. A cut block's scale would differ from its scale in one process."""
    split = {}
    for name, layer in layers.items():
        weight = layer.weight
        if isinstance(weight, DTensor) and not weight.placements[0].is_replicate():
            split[name] = weight.shape[weight.placements[0].dim]  # type: ignore[attr-defined]
    if cut := cut_block(form.name, split, tp):
        raise UserError(f"parallel.tp = {tp}: {cut[0]} of precision.float8 = {form.name}; {cut[1]}")


def _log_choice(kind: str, gather: bool, chosen: dict[str, nn.Linear], left_out: dict[str, str]) -> None:
    kinds = Counter(name.rpartition(".")[2] for name in chosen)
    log.info(
        "float8 %s: converted %d of %d linear layers (%s); their weights are gathered in %s",
        kind,
        len(chosen),
        len(chosen) + len(left_out),
        ", ".join(f"{number} {name}" for name, number in kinds.items()) or "none",
        "float8" if gather else "precision.compute",
    )
    for name, why in left_out.items():
        log.info("not in float8: %s %s", name, why)


def _log_experts(model: nn.Module, chosen: dict[str, Experts], precision: Precision) -> None:
    names = [name for name, module in model.named_modules() if isinstance(module, Experts)]
    if chosen:
        log.info(
            "float8 %s: converted the routed experts of %d of %d layers; their weight gradients are computed in "
            "precision.compute",
            precision.float8,
            len(chosen),
            len(names),
        )
    if len(chosen) < len(names):
        others = "the other routed experts" if chosen else "routed experts"
        log.info("not in float8: %s; their grouped products stay in precision.compute", others)
