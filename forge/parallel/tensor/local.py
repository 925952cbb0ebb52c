"""Modules of tensor parallelism.

Each replaces a module of the model, keeps its parameter names, and computes on local tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Shard as Split
from torch.nn import functional as F

from forge.model import Decay, Embedding, HeadIndices, RMSNorm, Router, SharedGate, ShortConvolution, Sinks
from forge.model.mla import Latents
from forge.model.mtp import Join
from forge.model.norm import ProjectionNorm, promoted
from forge.model.residual import DepthMix
from forge.parallel.step.collectives import (
    gather_for_all,
    gather_for_parts,
    own_piece,
    share,
    sum_to_all,
    sum_to_pieces,
)


@dataclass(frozen=True)
class ModulePlace:
    """The tensor-parallel mesh, and the placements around a module.

    stream: the placement of the residual stream: in pieces of the sequence, or whole on every rank. input, output: the
    placements of a linear layer's input (all features) and output. partial: True if the module processes only some of the
    tokens or heads on each rank.
    """

    mesh: DeviceMesh
    stream: Placement
    input: Placement
    output: Placement
    partial: bool


class LocalNorm(RMSNorm):
    """A norm of this rank's part of the activations; its weight is whole on every rank.

    partial_gradients: True if ranks see different tokens or heads. The weight's gradient must then be summed over ranks.
    """

    def __init__(self, plain: RMSNorm, place: ModulePlace):
        with torch.device("meta"):
            super().__init__(plain.weight.numel(), plain.eps)
        self.normalize, self.initial = plain.normalize, plain.initial
        self.weight = distributed(plain.weight, place.mesh, Replicate())
        self.partial_gradients = place.partial

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., dim]` -> `[..., dim]`."""
        return self.normalize(x, self.weight.shape, local_tensor(self.weight), self.eps)


class WholeProjectionNorm(LocalNorm):
    """A norm over all heads, after a projection that is not split: `x` has all heads on every rank. No communication."""

    def forward(self, x: Tensor) -> Tensor:
        """x `[batch, seq, heads, head_dim]` -> the same shape."""
        return super().forward(x.flatten(-2)).view_as(x)


class LocalProjectionNorm(ProjectionNorm):
    """A norm over all heads. Each rank has 1 / tp of the heads, and their elements of the weight. Collective."""

    def __init__(self, plain: ProjectionNorm, place: ModulePlace):
        with torch.device("meta"):
            super().__init__(plain.weight.numel(), plain.eps)
        self.initial, self.mesh = plain.initial, place.mesh
        self.weight = distributed(plain.weight, place.mesh, Split(0))

    def forward(self, x: Tensor) -> Tensor:
        """x `[batch, seq, heads / tp, head_dim]` -> the same shape."""
        exact = x.flatten(-2).to(promoted(x.dtype))
        # All ranks need the sum over all heads, and each continues with its own heads. So the gradient of the sum is
        # all-reduced too.
        square = share(sum_to_all(exact.square().sum(-1, keepdim=True), self.mesh), self.mesh)
        weight = local_tensor(self.weight).to(exact.dtype) + (1.0 - self.initial)
        return (exact * torch.rsqrt(square / self.weight.numel() + self.eps) * weight).to(x.dtype).view_as(x)


def local_projection_norm(plain: ProjectionNorm, place: ModulePlace) -> nn.Module:
    """Return a `LocalProjectionNorm` if the norm's projection is split, else a `WholeProjectionNorm`."""
    return LocalProjectionNorm(plain, place) if place.partial else WholeProjectionNorm(plain, place)


class LocalRouter(Router):
    """A router for this rank's piece of the sequence. Its weight is whole on every rank."""

    partial_gradients = True

    def __init__(self, plain: Router, place: ModulePlace):
        with torch.device("meta"):
            super().__init__(plain.weight.shape[1], plain.config, plain.layer)
        for name, weight in plain.named_parameters():
            self.register_parameter(name, distributed(weight, place.mesh, Replicate()))

    def logits(self, x: Tensor) -> Tensor:
        """x `[batch, seq / tp, dim]` -> `[batch, seq / tp, n_experts]` in the weight's dtype."""
        logits = self.multiply(x, local_tensor(self.weight))
        return logits if self.logit_bias is None else logits + local_tensor(self.logit_bias)


class LocalMix(DepthMix):
    """`DepthMix` for this rank's tokens. Its query is whole on every rank."""

    def __init__(self, plain: DepthMix, place: ModulePlace):
        with torch.device("meta"):
            super().__init__(plain.query.numel(), plain.eps)
        self.query = distributed(plain.query, place.mesh, Replicate())
        self.partial_gradients = place.partial

    def weight(self) -> Tensor:
        return local_tensor(self.query)


class LocalJoin(Join):
    """The projection `Join` for this rank's tokens. Its weight is whole on every rank."""

    def __init__(self, plain: Join, place: ModulePlace):
        with torch.device("meta"):
            super().__init__(plain.weight.shape[0])
        self.weight = distributed(plain.weight, place.mesh, Replicate())
        self.partial_gradients = place.partial

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """first, second `[batch, seq or seq / tp, dim]` -> `[batch, seq or seq / tp, dim]`."""
        return F.linear(torch.cat([first, second], dim=-1), local_tensor(self.weight))


class LocalSharedGate(SharedGate):
    """The gate of shared experts, for a piece of the sequence or all of it. Its weight is whole on every rank."""

    def __init__(self, plain: SharedGate, place: ModulePlace):
        with torch.device("meta"):
            super().__init__(plain.weight.shape[1])
        self.weight = distributed(plain.weight, place.mesh, Replicate())
        self.partial_gradients = place.partial

    def forward(self, x: Tensor) -> Tensor:
        """x `[batch, seq or seq / tp, dim]` -> `[batch, seq or seq / tp, 1]`."""
        return F.linear(x, local_tensor(self.weight)).sigmoid()


class LocalConvolution(ShortConvolution):
    """The convolution of this rank's channels if `split`, else of all channels."""

    def __init__(self, plain: ShortConvolution, place: ModulePlace, *, split: bool):
        with torch.device("meta"):
            super().__init__(plain.q.shape[0], plain.v.shape[0], plain.q.shape[1])
        _take_parameters(self, plain, place.mesh, Split(0) if split else Replicate())

    def weights(self) -> list[Tensor]:
        """Return this rank's part of the weights, as differentiable local tensors."""
        return [local_tensor(weight) for weight in self.parameters()]


class LocalDecay(Decay):
    """The decays of this rank's heads if `split`, else of all heads."""

    def __init__(self, plain: Decay, place: ModulePlace, *, split: bool):
        with torch.device("meta"):
            super().__init__(plain.a_log.numel(), plain.channels, plain.bound)
        _take_parameters(self, plain, place.mesh, Split(0) if split else Replicate())

    def weights(self) -> list[Tensor]:
        """Return this rank's part of the weights, as differentiable local tensors."""
        return [local_tensor(weight) for weight in self.parameters()]


class LocalEmbedding(Embedding):
    """An embedding. If `split`, each rank has some rows of the vocabulary, otherwise all.

    first_row: number of this rank's first row; None: every rank has all rows. Collective if split.
    """

    def __init__(self, plain: Embedding, place: ModulePlace, *, split: bool):
        with torch.device("meta"):
            vocab_size, dim = plain.weight.shape
            super().__init__(vocab_size, dim, plain.scale)
        self.first_row = first_row(plain.weight.shape[0], place.mesh) if split else None
        self.weight = distributed(plain.weight, place.mesh, Split(0) if split else Replicate())
        self.mesh, self.pieces = place.mesh, not place.stream.is_replicate()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the stream: `[batch, seq / tp, dim]`, or `[batch, seq, dim]` if the stream is whole on every rank.

        tokens: int64 `[batch, seq]`.
        """
        weight = local_tensor(self.weight)
        if self.first_row is None:
            x = self.scaled(F.embedding(tokens, weight))
            return own_piece(x, self.mesh) if self.pieces else x
        # A token whose row is on another rank looks up zeros, so the sum over ranks is the token's row.
        row = tokens - self.first_row
        here = (row >= 0) & (row < weight.shape[0])
        x = F.embedding(row.masked_fill(~here, 0), weight).masked_fill(~here.unsqueeze(-1), 0.0)
        return self.scaled(sum_to_pieces(x, self.mesh) if self.pieces else sum_to_all(x, self.mesh))


class LocalLinear(nn.Linear):
    """A linear layer on local tensors, without collectives.

    Its weight is split by rows, or whole on every rank. partial_gradients: True if ranks see different tokens. The
    gradient of a whole weight must then be summed over ranks.
    """

    def __init__(self, plain: nn.Linear, place: ModulePlace, *, split: bool, partial: bool):
        with torch.device("meta"):
            super().__init__(plain.in_features, plain.out_features, plain.bias is not None)
        for name, parameter in list(plain.named_parameters()):
            placement = Split(0) if split else Replicate()
            self.register_parameter(name, distributed(parameter, place.mesh, placement))
        self.partial_gradients = partial
        # (x, weight, bias) -> output. An extension point: float8 replaces this function.
        self.multiply: Callable[..., Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., in_features]` -> `[..., out_features]`, or this rank's `[..., out_features / tp]` if split."""
        bias = None if self.bias is None else local_tensor(self.bias)
        return self.multiply(x, local_tensor(self.weight), bias)


class LocalNarrow(LocalLinear):
    """The first half of a low-rank projection, to features shared by all heads.

    The weight is whole on every rank. The input is a DTensor, also whole on every rank. If the heads are split over
    ranks (`partial`), the gradients of weight and input are summed over ranks.
    """

    def __init__(self, plain: nn.Linear, place: ModulePlace):
        super().__init__(plain, place, split=False, partial=place.partial)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., in_features]` -> `[..., out_features]`, a local tensor."""
        assert isinstance(x, DTensor)
        return super().forward(
            x.to_local(grad_placements=[Partial() if self.partial_gradients else Replicate()])
        )


class SharedLatents(Latents):
    """Gathers the latents' pieces of the sequence in one collective.

    partial: True if the heads are split over ranks; gradients are then summed over the ranks. False: every rank has all
    heads.
    """

    def __init__(self, plain: Latents, place: ModulePlace):
        super().__init__()
        self.mesh, self.partial, self.pieces = place.mesh, place.partial, not place.stream.is_replicate()

    def forward(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """latent `[batch, seq or seq / tp, rank]`, key `[batch, seq or seq / tp, rope_dim]` -> both with the whole `seq`."""
        both = torch.cat([latent, key], dim=-1)
        if self.pieces:
            both = gather_for_parts(both, self.mesh) if self.partial else gather_for_all(both, self.mesh)
        elif self.partial:
            both = share(both, self.mesh)
        latent, key = both.split([latent.shape[-1], key.shape[-1]], dim=-1)
        return latent, key


class LocalSinks(Sinks):
    """The sink logits of this rank's heads if `split`, else of all heads."""

    def __init__(self, plain: Sinks, place: ModulePlace, *, split: bool):
        with torch.device("meta"):
            super().__init__(plain.weight.numel())
        self.weight = distributed(plain.weight, place.mesh, Split(0) if split else Replicate())

    def forward(self) -> Tensor:
        """Return the sink logits: `[heads / tp]` if split, else `[heads]`."""
        return local_tensor(self.weight)


def split_indices(indices: HeadIndices, place: ModulePlace) -> HeadIndices:
    """Keep only this rank's heads in `indices`, in place, and return `indices`."""
    share = len(indices.heads) // place.mesh.size()
    indices.heads = indices.heads[share * place.mesh.get_local_rank() :][:share]
    return indices


def distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> nn.Module:
    """Turn the direct parameters of `module` (on the meta device) into DTensors over the 1-D `mesh`, in place.

    Return `module`.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, distributed(parameter, mesh, placement))
    return module


def _take_parameters(module: nn.Module, plain: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Register the direct parameters of `plain` in `module`, as DTensors over the 1-D `mesh`."""
    for name, parameter in plain.named_parameters(recurse=False):
        module.register_parameter(name, distributed(parameter, mesh, placement))


def distributed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return `parameter` (on the meta device) as a DTensor over the 1-D `mesh`."""
    whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def first_row(vocabulary: int, mesh: DeviceMesh) -> int:
    """Return the number of this rank's first row of the vocabulary.

    Rows are split like torch.chunk: every rank has ceil(vocabulary / tp) rows, except that the last ones have fewer or
    none.
    """
    return min(vocabulary, -(-vocabulary // mesh.size()) * mesh.get_local_rank())


def local_tensor(weight: Tensor) -> Tensor:
    """Return this rank's part of the DTensor `weight`. Differentiable."""
    assert isinstance(weight, DTensor)
    return weight.to_local()
