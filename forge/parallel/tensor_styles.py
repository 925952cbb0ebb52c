"""What each style of tensor parallelism does to a module: STYLES, one table.

Linear layers are split by PyTorch's styles and compute on DTensors. Embedding, norms, routers and loss compute on local
tensors with collectives of their own, because DTensor would make the embedding's whole gradient on every rank and sum
each norm's gradient by itself in every microbatch. They are replaced by modules with the same parameters and names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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

from forge.model import Attention, Embedding, FeedForward, Head, RMSNorm, Router
from forge.parallel.collectives import own_piece, sum_to_all, sum_to_pieces


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
        self.weight = distributed(plain.weight, place.mesh, Replicate())
        self.partial_gradients = place.partial

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., dim]` -> `[..., dim]`."""
        return F.rms_norm(x, self.weight.shape, local_tensor(self.weight), self.eps)


class LocalRouter(Router):
    """A router of this rank's piece of the sequence; its weight is whole on every rank."""

    partial_gradients = True

    def __init__(self, plain: Router, place: Place):
        with torch.device("meta"):
            super().__init__(plain.weight.shape[1], plain.config, plain.layer)
        self.weight = distributed(plain.weight, place.mesh, Replicate())

    def logits(self, x: Tensor) -> Tensor:
        """x `[batch, seq / tp, dim]` -> `[batch, seq / tp, n_experts]` in the weight's dtype."""
        return F.linear(x.to(self.weight.dtype), local_tensor(self.weight))


class LocalEmbedding(Embedding):
    """Looks up all tokens among the rows of the vocabulary that this rank has.

    first_row: where these begin; None: all rows are on every rank.
    """

    def __init__(self, plain: Embedding, place: Place, *, split: bool):
        with torch.device("meta"):
            super().__init__(*plain.weight.shape)
        self.first_row = first_row(plain.weight.shape[0], place.mesh) if split else None
        self.weight = distributed(plain.weight, place.mesh, Split(0) if split else Replicate())
        self.mesh, self.pieces = place.mesh, not place.stream.is_replicate()

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 `[batch, seq]` -> the stream: `[batch, seq / tp, dim]` in pieces, else `[batch, seq, dim]`."""
        weight = local_tensor(self.weight)
        if self.first_row is None:
            x = F.embedding(tokens, weight)
            return own_piece(x, self.mesh) if self.pieces else x
        # A token of another rank's rows looks up zeros; the sum over ranks is then the one row there is.
        row = tokens - self.first_row
        here = (row >= 0) & (row < weight.shape[0])
        x = F.embedding(row.masked_fill(~here, 0), weight).masked_fill(~here.unsqueeze(-1), 0.0)
        return sum_to_pieces(x, self.mesh) if self.pieces else sum_to_all(x, self.mesh)


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
    RMSNorm: {"sequence_parallel": LocalNorm, None: LocalNorm},
    Router: {None: LocalRouter},
}


def styles_of(module: nn.Module) -> dict[str | None, Apply]:
    """Return the entry of STYLES for the kind of `module`; an empty one for a module that is left as it is."""
    return next((styles for kind, styles in STYLES.items() if isinstance(module, kind)), {})


def distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> nn.Module:
    """Make the parameters directly in `module` (on the meta device) DTensors over the 1-D `mesh`, in place."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, distributed(parameter, mesh, placement))
    return module


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
