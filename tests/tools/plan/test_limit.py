"""Under a memory limit a step succeeds if the plan says that it fits, and fails otherwise."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from math import inf
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_iter

from forge.config import check_world, parse_toml_text
from forge.model import Router
from forge.parallel.initialize import initialize
from forge.tools.plan import fake
from forge.tools.plan.plannable import plannable
from tests.support.planning import (
    FULL,
    INT8,
    MUON,
    SELECTIVE,
    experts,
    in_turn,
    larger,
    pipeline,
    plan_text,
    planned,
)

SLOW = pytest.mark.slow


class Limited(TorchDispatchMode):
    """Raise MemoryError if live tensors take more than `limit` bytes. Replaces a `Trace`."""

    def __init__(self, limit: float):
        super().__init__()
        self.limit = limit
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def watch(self, parts: Iterable[object]) -> None: ...
    def begin(self) -> None: ...

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        for tensor in tree_iter(output):
            # DTensor finds out shapes on fake tensors; a wrapper's storage has a size and no memory.
            if _has_memory(tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        living = [storage for one in self._storages.values() if (storage := one()) is not None]
        self._storages = {storage._cdata: weakref.ref(storage) for storage in living}
        if sum(storage.nbytes() for storage in living) > self.limit:
            raise MemoryError
        return output


def _has_memory(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and not isinstance(value, FakeTensor)
        and not is_traceable_wrapper_subclass(value)
    )


def succeeds(text: str, world: int, limit: float) -> bool:
    """Return whether rank 0 of a fake group makes two steps with real tensors under the limit."""
    config = plannable(parse_toml_text(text))[0]
    degrees = check_world(config, world)
    with (
        fake.fake_ranks(0, world),
        patch.object(fake, "FakeTensorMode", lambda **_: nullcontext()),
        patch.object(fake, "Trace", lambda: Limited(limit)),
        patch.object(fake, "_leave", initialize),
        patch.object(Router, "choose", in_turn),
    ):
        try:
            rank = fake.FakeRank(config, degrees)
            for _ in range(2):
                rank.step(degrees.accumulation)
        except MemoryError:
            return False
    return True


CASES = {
    "fsdp2": (larger(plan_text()), 4),
    "recomputed": (larger(plan_text("reshard_after_forward = 'always'"), FULL), 4),
    "selective": (larger(plan_text("tp = 2"), SELECTIVE), 2),
    "zero2 and tensor": (larger(plan_text('tp = 2\ndata_parallel = "zero2"')), 4),
    "ring": (larger(plan_text("cp = 2\ncontext = 'ring'\ndata_parallel = 'zero1'")), 2),
    "experts": (larger(experts("ep = 2")), 4),
    "pipeline": (larger(pipeline("1F1B")), 4),
    "interleaved": (larger(pipeline("Interleaved1F1B")), 2),
    "muon": (larger(plan_text(), MUON), 4),
    "int8": (larger(plan_text("tp = 2"), INT8), 4),
}


@pytest.mark.long
def test_a_limit_is_noticed() -> None:
    assert not succeeds(plan_text(), 1, 1000.0)
    assert succeeds(plan_text(), 1, inf)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name if name == "fsdp2" else pytest.param(name, marks=SLOW) for name in CASES]
)
def test_a_step_within_the_limit_runs_and_five_percent_more_does_not(name: str) -> None:
    text, world = CASES[name]
    needed = planned(text, world)[0].peak.size
    assert succeeds(text, world, needed)
    assert not succeeds(text, world, needed / 1.05)
