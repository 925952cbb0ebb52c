"""Which module is split in which way under tensor parallelism.

A plan maps names of modules, with globs for single components, to styles. The residual stream is in pieces of the
sequence with parallel.sequence_parallel, else whole on every rank; attention and feed-forward take it whole.

    colwise            rows of the weight are split: takes the whole input, returns some of the features
    rowwise            columns of the weight are split: takes some of the features, returns a sum into the stream
    colwise_rep        colwise, but the features are gathered on every rank
    rowwise_rep        rowwise, but the input has all features on every rank
    sequence_parallel  a norm on its piece of the sequence

For the embedding `rowwise` splits the vocabulary, for the head `colwise` does. What no pattern names stays whole on
every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from forge.config.layout import TENSOR_STYLES
from forge.errors import UserError, did_you_mean
from forge.model import Attention, FeedForward
from forge.parallel.layout import Layout
from forge.parallel.names import for_all_layers, has_all_names, matches_exact_depth
from forge.parallel.tensor_styles import styles_of

Plan: TypeAlias = dict[str, str | ParallelStyle]

# The plan of Megatron-LM (Shoeybi et al. 2019), with sequence parallelism after Korthikanti et al. 2022.
OWN: Mapping[str, str] = {
    "embedding": "rowwise",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "layers.*.feed_forward.shared.w1": "colwise",
    "layers.*.feed_forward.shared.w3": "colwise",
    "layers.*.feed_forward.shared.w2": "rowwise",
    "head": "colwise",
}
# Projections into a part of a block, and back into the residual stream.
PARTS: dict[type[nn.Module], tuple[tuple[str, ...], str]] = {
    Attention: (("wq", "wk", "wv"), "wo"),
    FeedForward: (("w1", "w3"), "w2"),
}


def plan_for(model: nn.Module, layout: Layout) -> Plan:
    """The style of every module that the configuration names, or the model's own plan names, by the module's whole name.

    Raises UserError for a pattern that matches nothing, a style that does not fit its module, a plan that cannot be
    imported, and projections of one part that do not go together.
    """
    key, patterns = _patterns(model, layout)
    plan: Plan = {}
    modules = dict(model.named_modules())
    for pattern, style in patterns.items():
        found = [name for name in modules if matches_exact_depth(pattern, name)]
        if not found and key is not None and has_all_names(model):
            raise UserError(f'{key}: "{pattern}" matches no module{_hint(pattern, modules)}')
        for name in found:
            _check_style(key, name, modules[name], style, layout)
            plan[name] = style
    for name, module in modules.items():
        _check_part(name, module, plan, layout.parallel.tp)
        inside = modules.get(name.rpartition(".")[0])
        if type(module) is nn.Linear and not isinstance(inside, tuple(PARTS)) and name not in plan:
            raise UserError(
                f"tensor parallelism does not know what {name} computes on; name it in a plan "
                f"(parallel.tp_plan = package.module:function) with a ParallelStyle of PyTorch"
            )
    return plan


def _patterns(model: nn.Module, layout: Layout) -> tuple[str | None, Mapping[str, Any]]:
    """The key that the plan is from (None: the model's own, where a pattern may match nothing) and the plan."""
    parallel = layout.parallel
    if parallel.tp_plan_styles:
        return "parallel.tp_plan_styles", parallel.tp_plan_styles
    if parallel.tp_plan == "auto":
        return None, getattr(model, "tensor_plan", OWN)
    key = f'parallel.tp_plan = "{parallel.tp_plan}"'
    try:
        plan = layout.tensor_plan(model)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{key} cannot be imported: {error}") from error
    if not isinstance(plan, dict):
        raise UserError(f"{key} returned a {type(plan).__name__}; needed: a dict of module names to styles")
    return key, plan


def _hint(pattern: str, names: Iterable[str]) -> str:
    general = for_all_layers(names)
    return did_you_mean(pattern, {*names, *general} if any(c.isdigit() for c in pattern) else general)


def _check_style(key: str | None, name: str, module: nn.Module, style: Any, layout: Layout) -> None:
    if isinstance(style, ParallelStyle):
        return
    where = f'{key or "plan of the model"}: "{name}"'
    if style not in TENSOR_STYLES:
        raise UserError(f"{where} = {style!r} is not a style; known: {', '.join(TENSOR_STYLES)}")
    fitting = [known for known in styles_of(module) if known is not None]
    if style not in fitting:
        allowed = f"use {' or '.join(fitting)}" if fitting else "it is not a module that can be split"
        raise UserError(f"{where} is a {type(module).__name__}, which cannot be {style}; {allowed}")
    if style == "sequence_parallel" and not layout.parallel.sequence_parallel:
        raise UserError(f"{where} = {style!r} needs parallel.sequence_parallel = true")
    tp = layout.parallel.tp
    if isinstance(module, nn.Linear):
        size = module.out_features if style.startswith("colwise") else module.in_features
        if size % tp:
            raise UserError(f"{where} splits {size} features, which parallel.tp = {tp} does not divide")


def _check_part(name: str, part: nn.Module, plan: Plan, tp: int) -> None:
    """All projections into a part give it the same share of the features, and the one back takes just that."""
    names = next((names for kind, names in PARTS.items() if isinstance(part, kind)), None)
    if names is None:
        return
    into = {leaf: plan.get(f"{name}.{leaf}") for leaf in names[0]}
    back = plan.get(f"{name}.{names[1]}")
    if any(isinstance(style, ParallelStyle) for style in (*into.values(), back)):
        return  # users check their own styles
    split = {style == "colwise" for style in into.values()}
    if len(split) > 1 or split != {back == "rowwise"}:
        shown = ", ".join(f"{leaf}: {style or 'whole'}" for leaf, style in (*into.items(), (names[1], back)))
        raise UserError(
            f"tensor parallelism cannot split {name} so ({shown}): either all of {', '.join(names[0])} are colwise "
            f"and {names[1]} is rowwise, or none of them is"
        )
    if isinstance(part, Attention) and split == {True}:
        heads = part.wk.out_features // part.head_dim
        if heads % tp:
            raise UserError(f"{name}: parallel.tp = {tp} does not divide its {heads} key/value heads")
