"""How modules are split under tensor parallelism. STYLES defines the effect of each style on each kind of module.

A plan maps module names, with a glob for each component, to styles. With parallel.sequence_parallel the residual stream
is in pieces of the sequence, else whole on every rank. Attention and feed-forward need the whole stream.

    colwise            rows of the weight are split: takes all input features, returns some of the output features
    rowwise            columns of the weight are split: takes some of the input features, returns all output features,
                       summed over ranks into the stream
    colwise_rep        colwise, then the output features are gathered on every rank
    rowwise_rep        rowwise, for an input with all features on every rank
    sequence_parallel  a norm of this rank's piece of the sequence

Latent attention computes its latents on pieces of the sequence and gathers the latents, which are smaller than the
stream. `rowwise` splits the vocabulary of the embedding; `colwise` splits the vocabulary of the head. Modules without a
matching pattern stay whole on every rank.

Linear layers are split by PyTorch's styles and compute on DTensors. Embedding, norms, routers and loss compute on local
tensors with their own collectives, because DTensor would materialise the embedding's whole gradient on every rank and
sum each norm's gradient separately in every microbatch. local.py has replacements with the same parameter names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Shard as Split

from forge.config.layout import TENSOR_STYLES
from forge.model import (
    Attention,
    Decay,
    Embedding,
    FeedForward,
    GroupedAttention,
    Head,
    HeadIndices,
    LatentAttention,
    LinearAttention,
    RMSNorm,
    Router,
    SharedGate,
    ShortConvolution,
    Sinks,
)
from forge.model.linear_attention import Narrow
from forge.model.mla import Down, Latents, Up
from forge.model.moe import Piecewise
from forge.model.mtp import Join
from forge.model.norm import ProjectionNorm
from forge.model.residual import DepthMix
from forge.parallel.layout import Layout
from forge.parallel.modules import for_all_layers, has_all_names, matches_exact_depth
from forge.parallel.tensor.local import (
    LocalConvolution,
    LocalDecay,
    LocalEmbedding,
    LocalJoin,
    LocalLinear,
    LocalMix,
    LocalNarrow,
    LocalNorm,
    LocalRouter,
    LocalSharedGate,
    LocalSinks,
    ModulePlace,
    SharedLatents,
    distribute,
    local_projection_norm,
    split_indices,
)
from forge.runtime.errors import UserError, did_you_mean

TensorPlan: TypeAlias = dict[str, str | ParallelStyle]

# The plan of Megatron-LM (Shoeybi et al. 2019), with sequence parallelism after Korthikanti et al. 2022.
OWN: Mapping[str, str] = {
    "embedding": "rowwise",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wq_b": "colwise",
    "layers.*.attention.wkv_b": "colwise",
    "layers.*.attention.sinks": "colwise",
    "layers.*.attention.head_indices": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.attention.wg": "colwise",
    "layers.*.attention.wa": "colwise",
    "layers.*.attention.wb": "colwise",
    "layers.*.attention.conv": "colwise",
    "layers.*.attention.decay": "colwise",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "layers.*.feed_forward.shared.w1": "colwise",
    "layers.*.feed_forward.shared.w3": "colwise",
    "layers.*.feed_forward.shared.w2": "rowwise",
    "head": "colwise",
}
# For each submodule of a block: its input projections, some of which may be missing, and its projection back into the
# stream.
PARTS: dict[type[nn.Module], tuple[tuple[str, ...], str]] = {
    GroupedAttention: (("wq", "wk", "wv", "wg", "sinks"), "wo"),
    LatentAttention: (("wq", "wq_b", "wkv_b", "wg", "sinks"), "wo"),
    LinearAttention: (("wq", "wk", "wv", "wg", "wa", "wb", "conv", "decay"), "wo"),
    FeedForward: (("w1", "w3"), "w2"),
}


def plan_for(model: nn.Module, layout: Layout) -> TensorPlan:
    """Return a dict from module name to style, for all modules that the plan matches.

    The plan is `parallel.tp_plan` or, for "auto", the model's `tensor_plan` if it has one, else OWN. Raises UserError
    for a pattern of `parallel.tp_plan` that matches no module, a style unsuitable for its module, a plan that cannot be
    imported, and inconsistent projections of one submodule.
    """
    key, patterns = _patterns(model, layout)
    plan: TensorPlan = {}
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
        unknown = type(module) is nn.Linear and not isinstance(inside, tuple(PARTS))
        if name not in plan and (unknown or _is_foreign(name, module, plan)):
            raise UserError(
                f"tensor parallelism does not know whether {name} needs whole or split inputs; set parallel.tp_plan = "
                f"package.module:function, and let the function return a PyTorch ParallelStyle for {name}"
            )
    return plan


def _is_foreign(name: str, module: nn.Module, plan: TensorPlan) -> bool:
    """Return whether `module` has direct parameters that tensor parallelism cannot split or replicate.

    Tensor parallelism can do so for modules with an entry in STYLES, modules inside a module with a ParallelStyle, and
    experts.
    """
    path = name.split(".")
    around = (plan.get(".".join(path[:end])) for end in range(1, len(path)))
    own = next(module.parameters(recurse=False), None) is not None
    styled = any(isinstance(style, ParallelStyle) for style in around)
    return own and not styles_of(module) and "experts" not in path and not styled


def _patterns(model: nn.Module, layout: Layout) -> tuple[str | None, Mapping[str, Any]]:
    """Return (configuration key, plan). The key is None for the default plan ("auto"), whose patterns may match nothing."""
    chosen = layout.parallel.tp_plan
    if isinstance(chosen, dict):
        return "parallel.tp_plan", chosen
    if chosen == "auto":
        return None, getattr(model, "tensor_plan", OWN)
    key, plan = f'parallel.tp_plan = "{chosen}"', layout.tensor_plan(model)
    if not isinstance(plan, dict):
        raise UserError(
            f"{key} returned a {type(plan).__name__}, but must return a dict from module name to style"
        )
    return key, plan


def _hint(pattern: str, names: Iterable[str]) -> str:
    general = for_all_layers(names)
    return did_you_mean(pattern, {*names, *general} if any(c.isdigit() for c in pattern) else general)


def _check_style(key: str | None, name: str, module: nn.Module, style: Any, layout: Layout) -> None:
    if isinstance(style, ParallelStyle):
        return
    where = f'{key or "plan of the model"}: "{name}"'
    if style not in TENSOR_STYLES:
        raise UserError(f"{where} = {style!r} is not a known style; known: {', '.join(TENSOR_STYLES)}")
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
    if isinstance(module, HeadIndices) and len(module.heads) % tp:
        raise UserError(f"{where} splits {len(module.heads)} heads, which parallel.tp = {tp} does not divide")


def _check_part(name: str, part: nn.Module, plan: TensorPlan, tp: int) -> None:
    """Check a submodule: either all projections are whole, or the input projections are colwise and the output is rowwise.

    Raises UserError otherwise, or if tp does not divide the heads.
    """
    names = next((names for kind, names in PARTS.items() if isinstance(part, kind)), None)
    if names is None:
        return
    present = [leaf for leaf in names[0] if getattr(part, leaf, None) is not None]
    into = {leaf: plan.get(f"{name}.{leaf}") for leaf in present}
    back = plan.get(f"{name}.{names[1]}")
    if any(isinstance(style, ParallelStyle) for style in (*into.values(), back)):
        return  # users check their own styles
    split = {style == "colwise" for style in into.values()}
    if len(split) > 1 or split != {back == "rowwise"}:
        shown = ", ".join(f"{leaf}: {style or 'whole'}" for leaf, style in (*into.items(), (names[1], back)))
        raise UserError(
            f"tensor parallelism cannot split {name} as configured ({shown}): make {', '.join(present)} "
            f"colwise and {names[1]} rowwise, or leave all of them whole"
        )
    if isinstance(part, GroupedAttention | LatentAttention | LinearAttention) and split == {True}:
        kinds = {"wk": "key heads" if isinstance(part, LinearAttention) else "key/value heads"}
        for leaf, heads in part.heads.items():
            if heads % tp:
                what = kinds.get(leaf, "heads")
                raise UserError(f"{name}: parallel.tp = {tp} does not divide its {heads} {what}")


def _take_stream(part: nn.Module, place: ModulePlace) -> nn.Module:
    """Return the submodule `part` unchanged, because each of its projections gathers its input."""
    return part


def _take_whole_input(part: nn.Module, place: ModulePlace) -> nn.Module:
    """Gather a submodule's input once, as one DTensor for all projections. The input's gradient is then summed only once."""
    others = (None,) * (len(inspect.signature(part.forward).parameters) - 1)
    style = PrepareModuleInput(
        input_layouts=(place.stream, *others),
        desired_input_layouts=(Replicate(), *others),
        use_local_output=False,
    )
    return parallelize_module(part, place.mesh, style)


def _split_head(head: Head, place: ModulePlace, *, split: bool) -> nn.Module:
    return distribute(head, place.mesh, Split(0) if split else Replicate())


def _split_linear(
    linear: nn.Linear, place: ModulePlace, *, style: Callable[[ModulePlace], ParallelStyle]
) -> nn.Module:
    return parallelize_module(linear, place.mesh, style(place), src_data_rank=None)


def _compute_on_every_rank(linear: nn.Linear, place: ModulePlace) -> nn.Module:
    style = PrepareModuleInputOutput(
        input_layouts=place.input,
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=place.output,
    )
    return parallelize_module(distribute(linear, place.mesh, Replicate()), place.mesh, style)


Apply: TypeAlias = Callable[[Any, ModulePlace], nn.Module]

# For each kind of module: style -> function returning the split module. Style None: no pattern matches the module.
STYLES: dict[type[nn.Module], dict[str | None, Apply]] = {
    LatentAttention: {None: _take_stream},
    Attention: {None: _take_whole_input},
    LinearAttention: {None: _take_whole_input},
    FeedForward: {None: _take_whole_input},
    Down: {None: lambda linear, at: LocalLinear(linear, at, split=False, partial=at.partial)},
    Up: {
        "colwise": partial(LocalLinear, split=True, partial=False),
        None: partial(LocalLinear, split=False, partial=False),
    },
    Narrow: {None: LocalNarrow},
    # Every rank routes its own piece of the sequence, even if the stream is whole on every rank.
    Piecewise: {None: partial(LocalLinear, split=False, partial=True)},
    Latents: {None: SharedLatents},
    HeadIndices: {"colwise": split_indices},
    Sinks: {"colwise": partial(LocalSinks, split=True), None: partial(LocalSinks, split=False)},
    nn.Linear: {
        "colwise": partial(_split_linear, style=lambda at: ColwiseParallel(input_layouts=at.input)),
        "rowwise": partial(_split_linear, style=lambda at: RowwiseParallel(output_layouts=at.output)),
        "colwise_rep": partial(
            _split_linear,
            style=lambda at: ColwiseParallel(input_layouts=at.input, output_layouts=at.output),
        ),
        "rowwise_rep": partial(
            _split_linear,
            style=lambda at: RowwiseParallel(input_layouts=Replicate(), output_layouts=at.output),
        ),
        None: _compute_on_every_rank,
    },
    Embedding: {
        "rowwise": partial(LocalEmbedding, split=True),
        "rowwise_rep": partial(LocalEmbedding, split=True),
        None: partial(LocalEmbedding, split=False),
    },
    Head: {
        "colwise": partial(_split_head, split=True),
        "colwise_rep": partial(_split_head, split=True),
        None: partial(_split_head, split=False),
    },
    ProjectionNorm: {None: local_projection_norm},
    RMSNorm: {"sequence_parallel": LocalNorm, None: LocalNorm},
    Router: {None: LocalRouter},
    DepthMix: {None: LocalMix},
    Join: {None: LocalJoin},
    SharedGate: {None: LocalSharedGate},
    ShortConvolution: {
        "colwise": partial(LocalConvolution, split=True),
        None: partial(LocalConvolution, split=False),
    },
    Decay: {"colwise": partial(LocalDecay, split=True), None: partial(LocalDecay, split=False)},
}


def styles_of(module: nn.Module) -> dict[str | None, Apply]:
    """Return the entry of STYLES for the kind of `module`; empty if modules of this kind stay unchanged."""
    return next((styles for kind, styles in STYLES.items() if isinstance(module, kind)), {})


def input_of(model: nn.Module, name: str, stream: Placement) -> Placement:
    """Return the placement of the input of linear layer `name`: `stream` in latent attention, else replicated.

    In both cases each rank has all features of its tokens. The output projection of latent attention also has a
    replicated input.
    """
    parent, _, leaf = name.rpartition(".")
    latent = isinstance(model.get_submodule(parent), LatentAttention) and leaf != "wo"
    return stream if latent else Replicate()
