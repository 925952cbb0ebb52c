"""`Shard`: what this rank holds of one parameter, whichever engine and layout put it there.

Initialisation, gradient norm, optimizers, checkpoints, digests and the memory report walk `list[Shard]`,
so none of them asks how the model is distributed. PyTorch's placement of the same name, which says along which dimension
a DTensor is split, is imported as `Split` throughout.
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
    """Factors for one parameter. By forge/parallel/parametrization.py: lr, orthogonal: of the learning rate, for updates by
    size or sign and for orthogonalised ones; weight decay is divided by it; eps: of what is added to the root. By
    optimizer.groups: scale: of the learning rate, for update and weight decay."""

    lr: float = 1.0
    orthogonal: float = 1.0
    eps: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of the parameter `name`: knowledge that does not change, and the tensor that does.

    `parameter` is the leaf that training updates: a DTensor under fsdp2, a flat slice under a contiguous-buffer engine.
    Its local elements are those of `boxes`, one box after another, each in row-major order; a rank that holds
    nothing has no boxes. `replicas` is the group of ranks that hold copies of the same elements (None: only this rank).
    `heads`: of how many attention heads the rows are, one head after another; 1 where rows are of no heads.
    `rates`: of its updates.
    `boxes_on`: boxes on a rank, by its global number, where arithmetic knows them; None: only that rank does.
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
        """All of `parameter` on this rank. more: further fields."""
        box = Box((0,) * parameter.ndim, tuple(parameter.shape))
        return cls(name, parameter.shape, (box,), parameter, **more)

    @property
    def data(self) -> Tensor:
        """The local elements; writing to them changes the parameter."""
        return local(self.parameter).detach()

    @property
    def grad(self) -> Tensor | None:
        """The local elements of the gradient, complete only after `finalize_gradients`; None before a backward."""
        grad = self.parameter.grad
        return None if grad is None else local(grad)

    @property
    def counted(self) -> bool:
        """True on exactly one of the ranks that hold the same elements: the one that enters sums over all ranks."""
        return self.replicas is None or self.replicas.rank() == 0

    def pieces(self, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Views into `tensor` (laid out like `data`: the parameter itself, a moment), one per box and in its shape."""
        flat, start = tensor.reshape(-1), 0
        for box in self.boxes:
            yield box, flat[start : start + box.numel].view(box.sizes)
            start += box.numel


_PLAIN = (Tensor, nn.Parameter)


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` in this process: a DTensor's local tensor, any other tensor itself."""
    if type(tensor) in _PLAIN:
        return tensor  # called for every parameter several times a step
    mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # A weight that FSDP gathers in float8 is wrapped by torchao; the plain one is inside.
    return getattr(mine, "_tensor", mine)
