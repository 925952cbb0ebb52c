"""`Shard`: this rank's part of one parameter, in any engine and layout.

Initialisation, gradient norm, optimizers, checkpoints, digests and the memory report work on `list[Shard]`, so they do
not depend on the layout. PyTorch's placement class `Shard` (a DTensor split along a dimension) is imported as `Split`
throughout forge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

Kind: TypeAlias = Literal["dense", "expert", "router", "convolution"]


@dataclass(frozen=True)
class Box:
    """A rectangular part of a global tensor: elements `offsets[d] <= index[d] < offsets[d] + sizes[d]`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)


@dataclass(frozen=True)
class Rates:
    """Factors for the updates of one parameter.

    lr: factor on the learning rate of an elementwise update. orthogonal: the same for an orthogonalised update. Neither
    changes the product of learning rate and weight decay.
    eps: factor on the optimizer's epsilon. forge/parallel/parametrization.py sets lr, orthogonal and eps.
    scale: factor on the learning rate of both update and weight decay, from optimizer.groups.
    """

    lr: float = 1.0
    orthogonal: float = 1.0
    eps: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Shard:
    """The local part of the parameter `name`: constant metadata and the tensor.

    parameter: the leaf tensor updated by training: a DTensor under fsdp2, a flat slice under a contiguous-buffer
    engine.
    boxes: the local elements, one box after another, each in row-major order; empty if the rank holds none.
    replicas: group of ranks with the same elements; None: only this rank has these elements.
    heads: number of attention heads in the rows, one head after another; 1 if the rows do not belong to heads.
    rates: factors of the parameter's updates.
    boxes_on: function from a global rank to its boxes; None: boxes of other ranks are unknown without communication.
    """

    name: str
    global_shape: torch.Size
    boxes: tuple[Box, ...]
    parameter: Tensor
    replicas: ProcessGroup | None = None
    kind: Kind = "dense"
    heads: int = 1
    rates: Rates = Rates()
    boxes_on: Callable[[int], tuple[Box, ...]] | None = None

    @classmethod
    def whole(cls, name: str, parameter: Tensor, **more: Any) -> Shard:
        """Return a shard with all of `parameter` on this rank. more: values of other fields of `Shard`."""
        box = Box((0,) * parameter.ndim, tuple(parameter.shape))
        return cls(name, parameter.shape, (box,), parameter, **more)

    @property
    def data(self) -> Tensor:
        """Return the local elements. Writing to the result changes the parameter."""
        return local(self.parameter).detach()

    @property
    def grad(self) -> Tensor | None:
        """Return the gradient of the local elements, complete only after `finalize_gradients`; None before backward."""
        grad = self.parameter.grad
        return None if grad is None else local(grad)

    @property
    def is_primary_replica(self) -> bool:
        """Return whether this rank contributes these elements to sums over all ranks.

        True on exactly one of the ranks with these elements.
        """
        return self.replicas is None or self.replicas.rank() == 0

    def pieces(self, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield (box, view of `tensor` in the box's shape) for each box. tensor: laid out like `data`, e.g. a moment."""
        flat, start = tensor.reshape(-1), 0
        for box in self.boxes:
            yield box, flat[start : start + box.numel].view(box.sizes)
            start += box.numel


_PLAIN = (Tensor, nn.Parameter)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of `tensor`: a DTensor's local tensor, any other tensor itself."""
    if type(tensor) in _PLAIN:
        return tensor  # fast path, because this is called for every parameter several times per step
    mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # torchao wraps weights gathered by FSDP in float8. Return the plain tensor inside.
    return getattr(mine, "_tensor", mine)
