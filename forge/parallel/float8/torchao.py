"""torchao's two float8 recipes, tensorwise and rowwise.

torchao replaces linear layers with its own, which scale and round the operands. torchao is imported only if one of these
recipes is used.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from forge.parallel.layout import Layout
from forge.parallel.modules import carry_hooks, count_hooks
from forge.runtime.errors import UserError


def convert_with_torchao(
    model: nn.Module, chosen: dict[str, nn.Linear], recipe: str, *, emulate: bool, gather: bool
) -> None:
    """Replace the layers `chosen` of `model` with torchao's float8 layers, in place.

    gather: True if FSDP gathers their weights in float8.
    """
    with quiet():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, enable_fsdp_float8_all_gather=gather
    )
    hooks = count_hooks(model)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)
    for name, layer in chosen.items():
        carry_hooks(layer, model.get_submodule(name))
    # Tensor parallelism lives in these hooks: without them every rank would silently treat its part as the whole.
    assert count_hooks(model) == hooks, "hooks were lost when linear layers were swapped"


def scale_refresher(model: nn.Module) -> Callable[[], None]:
    """Return a function that computes the float8 scales of all weights of `model`, an FSDP model, in one all-reduce.

    Call the function on all ranks after each change of the parameters. Before its first call, FSDP computes each scale
    separately in forward, with the same result. If FSDP does not gather weights in float8, the function does nothing.
    """
    gathers = "enable_fsdp_float8_all_gather"
    if not any(getattr(getattr(module, "config", None), gathers, False) for module in model.modules()):
        return lambda: None
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    return functools.partial(precompute_float8_dynamic_scale_for_fsdp, model)


def gathers_in_float8(chosen: dict[str, nn.Linear], layout: Layout) -> bool:
    """Return whether FSDP gathers the chosen weights in float8.

    Raises UserError if float8_all_gather is true and the layout does not allow it.
    """
    wanted, parallel, mesh = layout.precision.float8_all_gather, layout.parallel, layout.meshes.fsdp
    if layout.precision.float8 != "tensorwise" or wanted is False:
        return False
    if wanted == "auto" and (parallel.data_parallel != "fsdp2" or parallel.tp > 1):
        return False
    if isinstance(parallel.reshard_after_forward, int):
        # FSDP2 cannot gather a weight again that is resharded over fewer ranks and has a gather of its own.
        if wanted is True:
            raise UserError(
                f"precision.float8_all_gather = true does not work with parallel.reshard_after_forward = "
                f"{parallel.reshard_after_forward}; use auto or false, or reshard_after_forward = always, never or auto"
            )
        return False
    # torchao gathers each rank's rows without padding, so all ranks need the same number of rows.
    ranks = mesh.size(mesh.ndim - 1)
    uneven = [name for name, layer in chosen.items() if layer.weight.shape[0] % ranks]
    if uneven and wanted is True:
        rows = chosen[uneven[0]].weight.shape[0]
        raise UserError(
            f"precision.float8_all_gather = true needs rows that divide among the {ranks} ranks, but {uneven[0]} has {rows} "
            "rows; use auto or false"
        )
    return not uneven


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torchao's import warnings about missing extensions, which forge does not use."""
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
