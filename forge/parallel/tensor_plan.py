"""Which module is split in which way under tensor parallelism, and what each style does to a module: STYLES.

A plan maps names of modules, with globs for single components, to styles. The residual stream is in pieces of the
sequence with parallel.sequence_parallel, else whole on every rank; attention and feed-forward take it whole.

    colwise            rows of the weight are split: takes the whole input, returns some of the features
    rowwise            columns of the weight are split: takes some of the features, returns a sum into the stream
    colwise_rep        colwise, but the features are gathered on every rank
    rowwise_rep        rowwise, but the input has all features on every rank
    sequence_parallel  a norm on its piece of the sequence

For the embedding `rowwise` splits the vocabulary, for the head `colwise` does. What no pattern names stays whole on
every rank.

Linear layers are split by PyTorch's styles and compute on DTensors. Embedding, norms, routers and loss compute on local
tensors with collectives of their own, because DTensor would make the embedding's whole gradient on every rank and sum
each norm's gradient by itself in every microbatch. They are replaced by modules with the same parameters and names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Shard as Split
from torch.nn import functional as F

from forge.config.layout import TENSOR_STYLES
from forge.errors import UserError, did_you_mean
from forge.model import (
    Attention,
    Decay,
    Embedding,
    FeedForward,
    Head,
    LinearAttention,
    RMSNorm,
    Router,
    SharedGate,
    ShortConvolution,
)
from forge.model.mtp import Join
from forge.model.norm import ProjectionNorm
from forge.model.precision import promoted
from forge.parallel.collectives import own_piece, share, sum_to_all, sum_to_pieces
from forge.parallel.layout import Layout
from forge.parallel.modules import for_all_layers, has_all_names, matches_exact_depth

Plan: TypeAlias = dict[str, str | ParallelStyle]

# The plan of Megatron-LM (Shoeybi et al. 2019), with sequence parallelism after Korthikanti et al. 2022.
OWN: Mapping[str, str] = {
    "embedding": "rowwise",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
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
# Projections into a part of a block, and back into the residual stream.
PARTS: dict[type[nn.Module], tuple[tuple[str, ...], str]] = {
    Attention: (("wq", "wk", "wv"), "wo"),
    LinearAttention: (("wq", "wk", "wv", "wg", "wa", "wb", "conv", "decay"), "wo"),
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
    key, plan = f'parallel.tp_plan = "{parallel.tp_plan}"', layout.tensor_plan(model)
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
    into = {leaf: plan.get(f"{name}.{leaf}") for leaf in names[0] if hasattr(part, leaf)}
    back = plan.get(f"{name}.{names[1]}")
    if any(isinstance(style, ParallelStyle) for style in (*into.values(), back)):
        return  # users check their own styles
    split = {style == "colwise" for style in into.values()}
    if len(split) > 1 or split != {back == "rowwise"}:
        shown = ", ".join(f"{leaf}: {style or 'whole'}" for leaf, style in (*into.items(), (names[1], back)))
        raise UserError(
            f"tensor parallelism cannot split {name} so ({shown}): either all of {', '.join(into)} are colwise "
            f"and {names[1]} is rowwise, or none of them is"
        )
    if isinstance(part, Attention) and split == {True}:
        heads = part.wk.out_features // part.head_dim
        if heads % tp:
            raise UserError(f"{name}: parallel.tp = {tp} does not divide its {heads} key/value heads")
    if isinstance(part, LinearAttention) and split == {True} and part.heads["wk"] % tp:
        raise UserError(f"{name}: parallel.tp = {tp} does not divide its {part.heads['wk']} key heads")


@dataclass(frozen=True)
class Place:
    """Where in the model a module lies.

    stream: the layout of the residual stream, in pieces of the sequence or whole on every rank. output: the layout of a
    linear layer's output that has all features. partial: the module works on only some of the tokens or heads.
    """

    mesh: DeviceMesh
    stream: Placement
    output: Placement
    partial: bool


class LocalNorm(RMSNorm):
    """A norm on this rank's part of the activations; its weight is whole on every rank.

    partial_gradients: ranks see different tokens or heads, so the weight's gradient is a sum over them.
    """

    def __init__(self, plain: RMSNorm, place: Place):
        with torch.device("meta"):
            super().__init__(plain.weight.numel(), plain.eps)
        self.normalize, self.initial = plain.normalize, plain.initial
        self.weight = distributed(plain.weight, place.mesh, Replicate())
        self.partial_gradients = place.partial

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., dim]` -> `[..., dim]`."""
        return self.normalize(x, self.weight.shape, local_tensor(self.weight), self.eps)


class WholeProjectionNorm(LocalNorm):
    """A norm over all heads, which every rank has."""

    def forward(self, x: Tensor) -> Tensor:
        """x `[batch, seq, heads, head_dim]` -> the same shape."""
        return super().forward(x.flatten(-2)).view_as(x)


class LocalProjectionNorm(ProjectionNorm):
    """A norm over all heads of which this rank has some, with their part of the weight."""

    def __init__(self, plain: ProjectionNorm, place: Place):
        with torch.device("meta"):
            super().__init__(plain.weight.numel(), plain.eps)
        self.initial, self.mesh = plain.initial, place.mesh
        self.weight = distributed(plain.weight, place.mesh, Split(0))

    def forward(self, x: Tensor) -> Tensor:
        """x `[batch, seq, heads / tp, head_dim]` -> the same shape."""
        exact = x.flatten(-2).to(promoted(x.dtype))
        # All ranks need the sum over all heads, and each goes on with its own: the gradient is a sum over them, too.
        square = share(sum_to_all(exact.square().sum(-1, keepdim=True), self.mesh), self.mesh)
        weight = local_tensor(self.weight).to(exact.dtype) + (1.0 - self.initial)
        return (exact * torch.rsqrt(square / self.weight.numel() + self.eps) * weight).to(x.dtype).view_as(x)


def _local_projection_norm(plain: ProjectionNorm, place: Place) -> nn.Module:
    """Split the norm where its projection is split."""
    return LocalProjectionNorm(plain, place) if place.partial else WholeProjectionNorm(plain, place)


class LocalRouter(Router):
    """A router of this rank's piece of the sequence; its weight is whole on every rank."""

    partial_gradients = True

    def __init__(self, plain: Router, place: Place):
        with torch.device("meta"):
            super().__init__(plain.weight.shape[1], plain.config, plain.layer)
        for name, weight in plain.named_parameters():
            self.register_parameter(name, distributed(weight, place.mesh, Replicate()))

    def logits(self, x: Tensor) -> Tensor:
        """x `[batch, seq / tp, dim]` -> `[batch, seq / tp, n_experts]` in the weight's dtype."""
        bias = None if self.logit_bias is None else local_tensor(self.logit_bias)
        return F.linear(x.to(self.weight.dtype), local_tensor(self.weight), bias)


class LocalJoin(Join):
    """A projection of this rank's part of the tokens; its weight is whole on every rank."""

    def __init__(self, plain: Join, place: Place):
        with torch.device("meta"):
            super().__init__(plain.weight.shape[0])
        self.weight = distributed(plain.weight, place.mesh, Replicate())
        self.partial_gradients = place.partial

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Both `[batch, seq, dim]` or pieces of the sequence -> the same shape."""
        return F.linear(torch.cat([first, second], dim=-1), local_tensor(self.weight))


class LocalSharedGate(SharedGate):
    """The gate of shared experts, on this rank's piece of the sequence or on all of it; its weight is whole on every rank."""

    def __init__(self, plain: SharedGate, place: Place):
        with torch.device("meta"):
            super().__init__(plain.weight.shape[1])
        self.weight = distributed(plain.weight, place.mesh, Replicate())
        self.partial_gradients = place.partial

    def forward(self, x: Tensor) -> Tensor:
        """x `[batch, seq or seq / tp, dim]` -> `[batch, seq or seq / tp, 1]`."""
        return F.linear(x, local_tensor(self.weight)).sigmoid()


class LocalConvolution(ShortConvolution):
    """The convolution of this rank's channels, or of all on every rank."""

    def __init__(self, plain: ShortConvolution, place: Place, *, split: bool):
        with torch.device("meta"):
            super().__init__(plain.q.shape[0], plain.v.shape[0], plain.q.shape[1])
        _take_parameters(self, plain, place.mesh, Split(0) if split else Replicate())

    def weights(self) -> list[Tensor]:
        """Return this rank's part of the weights; gradients pass."""
        return [local_tensor(weight) for weight in self.parameters()]


class LocalDecay(Decay):
    """The decays of this rank's heads, or of all on every rank."""

    def __init__(self, plain: Decay, place: Place, *, split: bool):
        with torch.device("meta"):
            super().__init__(plain.a_log.numel())
        _take_parameters(self, plain, place.mesh, Split(0) if split else Replicate())

    def weights(self) -> list[Tensor]:
        """Return this rank's part of the weights; gradients pass."""
        return [local_tensor(weight) for weight in self.parameters()]


class LocalEmbedding(Embedding):
    """Looks up all tokens among the rows of the vocabulary that this rank has.

    first_row: where these begin; None: all rows are on every rank.
    """

    def __init__(self, plain: Embedding, place: Place, *, split: bool):
        with torch.device("meta"):
            vocab_size, dim = plain.weight.shape
            super().__init__(vocab_size, dim, plain.scale)
        self.first_row = first_row(plain.weight.shape[0], place.mesh) if split else None
        self.weight = distributed(plain.weight, place.mesh, Split(0) if split else Replicate())
        self.mesh, self.pieces = place.mesh, not place.stream.is_replicate()

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 `[batch, seq]` -> the stream: `[batch, seq / tp, dim]` in pieces, else `[batch, seq, dim]`."""
        weight = local_tensor(self.weight)
        if self.first_row is None:
            x = self.scaled(F.embedding(tokens, weight))
            return own_piece(x, self.mesh) if self.pieces else x
        # A token of another rank's rows looks up zeros; the sum over ranks is then the one row there is.
        row = tokens - self.first_row
        here = (row >= 0) & (row < weight.shape[0])
        x = F.embedding(row.masked_fill(~here, 0), weight).masked_fill(~here.unsqueeze(-1), 0.0)
        return self.scaled(sum_to_pieces(x, self.mesh) if self.pieces else sum_to_all(x, self.mesh))


def _take_whole_input(part: nn.Module, place: Place) -> nn.Module:
    """Gather a part's input once, as one DTensor for all projections, so that their gradients are summed only once."""
    others = (None,) * (len(inspect.signature(part.forward).parameters) - 1)
    style = PrepareModuleInput(
        input_layouts=(place.stream, *others),
        desired_input_layouts=(Replicate(), *others),
        use_local_output=False,
    )
    return parallelize_module(part, place.mesh, style)


def _split_head(head: Head, place: Place, *, split: bool) -> nn.Module:
    return distribute(head, place.mesh, Split(0) if split else Replicate())


def _split_linear(linear: nn.Linear, place: Place, *, style: Callable[[Place], ParallelStyle]) -> nn.Module:
    return parallelize_module(linear, place.mesh, style(place), src_data_rank=None)


def _compute_on_every_rank(linear: nn.Linear, place: Place) -> nn.Module:
    style = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=place.output,
    )
    return parallelize_module(distribute(linear, place.mesh, Replicate()), place.mesh, style)


Apply: TypeAlias = Callable[[Any, Place], nn.Module]

# For each kind of module its styles, and what makes of a module one that is split so. None: no pattern names the module.
STYLES: dict[type[nn.Module], dict[str | None, Apply]] = {
    Attention: {None: _take_whole_input},
    LinearAttention: {None: _take_whole_input},
    FeedForward: {None: _take_whole_input},
    nn.Linear: {
        "colwise": partial(_split_linear, style=lambda _: ColwiseParallel()),
        "rowwise": partial(_split_linear, style=lambda at: RowwiseParallel(output_layouts=at.output)),
        "colwise_rep": partial(_split_linear, style=lambda at: ColwiseParallel(output_layouts=at.output)),
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
    ProjectionNorm: {None: _local_projection_norm},
    RMSNorm: {"sequence_parallel": LocalNorm, None: LocalNorm},
    Router: {None: LocalRouter},
    Join: {None: LocalJoin},
    SharedGate: {None: LocalSharedGate},
    ShortConvolution: {
        "colwise": partial(LocalConvolution, split=True),
        None: partial(LocalConvolution, split=False),
    },
    Decay: {"colwise": partial(LocalDecay, split=True), None: partial(LocalDecay, split=False)},
}


def styles_of(module: nn.Module) -> dict[str | None, Apply]:
    """Return the entry of STYLES for the kind of `module`; an empty one for a module that is left as it is."""
    return next((styles for kind, styles in STYLES.items() if isinstance(module, kind)), {})


def distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> nn.Module:
    """Make the parameters directly in `module` (on the meta device) DTensors over the 1-D `mesh`, in place."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, distributed(parameter, mesh, placement))
    return module


def _take_parameters(module: nn.Module, plain: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Give `module` the parameters directly in `plain`, as DTensors over the 1-D `mesh`."""
    for name, parameter in plain.named_parameters(recurse=False):
        module.register_parameter(name, distributed(parameter, mesh, placement))


def distributed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return `parameter` (on the meta device) as a DTensor over the 1-D `mesh`."""
    whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def first_row(vocabulary: int, mesh: DeviceMesh) -> int:
    """Return where this rank's rows begin: all ranks but the last ones have ceil(vocabulary / tp) of them."""
    return min(vocabulary, -(-vocabulary // mesh.size()) * mesh.get_local_rank())


def local_tensor(weight: nn.Parameter) -> Tensor:
    """Return this rank's part of `weight`, a DTensor; gradients pass."""
    assert isinstance(weight, DTensor)
    return weight.to_local()
