"""A recorder of every collective that a piece of code issues, with its size: a redundant gather is a failing test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge.tools.plan.collectives import collective_of


class Collectives(TorchDispatchMode):
    """Context manager; `calls` are (name, bytes of the call's largest tensor) in the order of their issue.

    Counts like PyTorch's CommDebugMode, whose module hooks fail with FSDP2 in a second step. A
    collective without a name in forge/tools/plan/collectives.py keeps its operator's name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor then works under this mode on the local tensors, with collectives of its own.
            return NotImplemented
        found = collective_of(func, args)
        if found is not None:
            self.calls.append((found.kind, found.size))
        return func(*args, **(kwargs or {}))

    def number(self) -> dict[str, int]:
        """Return name -> number of calls."""
        return dict(Counter(name for name, _ in self.calls))

    def sizes(self, name: str) -> list[int]:
        """Return the bytes of each call with this name, in order."""
        return [size for called, size in self.calls if called == name]


def collectives_of(action: Callable[[], Any]) -> Collectives:
    """Return the collectives that `action` issues."""
    with Collectives() as collectives:
        action()
    return collectives
