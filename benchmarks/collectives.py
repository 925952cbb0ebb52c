"""A recorder of the collectives and their sizes in a piece of code. Tests use it to find redundant gathers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge.tools.plan.collectives import collective_of


class Collectives(TorchDispatchMode):
    """A context manager that records `calls`, in order of issue, as (name, bytes of the largest tensor of the call).

    Replaces PyTorch's CommDebugMode, whose module hooks fail in a second step with FSDP2. The names are those of NAMES in
    forge/tools/plan/collectives.py. Collectives missing there have the operator's name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor's own operators and collectives on local tensors then reach this mode.
            return NotImplemented
        found = collective_of(func, args)
        if found is not None:
            self.calls.append((found.kind, found.size))
        return func(*args, **(kwargs or {}))

    def number(self) -> dict[str, int]:
        """Return the number of calls by name of the collective."""
        return dict(Counter(name for name, _ in self.calls))

    def sizes(self, name: str) -> list[int]:
        """Return the bytes of each call of collective `name`, in order."""
        return [size for called, size in self.calls if called == name]


def collectives_of(action: Callable[[], Any]) -> Collectives:
    """Call `action`. Return its collectives."""
    with Collectives() as collectives:
        action()
    return collectives
