"""A recorder of every collective that a piece of code issues, with its size: a redundant gather is a failing test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMES = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
}


class Collectives(TorchDispatchMode):
    """Context manager; `calls` are (name, bytes of the largest tensor that takes part) in the order of their issue.

    Counts what PyTorch's CommDebugMode counts; that one's module hooks do not go with FSDP2 in a second step. A
    collective without an entry in NAMES keeps the name of its operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor then works under this mode on the local tensors, with collectives of its own.
            return NotImplemented
        name = func._overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and name not in (
            "wait_tensor",
            "_wrap_tensor_autograd",
        ):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            size = max((tensor.numel() * tensor.itemsize for tensor in tensors), default=0)
            self.calls.append((NAMES.get(name, name), size))
        return func(*args, **(kwargs or {}))

    def number(self) -> dict[str, int]:
        """Name -> how often."""
        return dict(Counter(name for name, _ in self.calls))

    def sizes(self, name: str) -> list[int]:
        """Bytes of each call of that name, in order."""
        return [size for called, size in self.calls if called == name]


def collectives_of(action: Callable[[], Any]) -> Collectives:
    """What `action` issues."""
    with Collectives() as collectives:
        action()
    return collectives
