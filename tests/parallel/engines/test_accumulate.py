"""Accumulation of reduced gradients over microbatches: one addition per unit, with the values of FSDP2's own additions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from forge.parallel.engines.accumulate import SummingReduceScatter
from forge.shard import local
from tests.support.harness import run_ranks

MICROBATCHES = 3
PARAMETERS = 3


class Net(nn.Module):
    """A linear layer with a bias, and a gain that a microbatch may leave out. No size is a multiple of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, gained: bool) -> Tensor:
        y = self.linear(x)
        return (y * self.gain if gained else y).square().sum()


class Additions(TorchDispatchMode):
    """Counts additions in place."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.add_.Tensor
        return func(*args, **(kwargs or {}))


def _accumulated(
    rank: int, world: int, reduce: str, missing: int | None, replicas: int, summing: bool
) -> tuple[list[Tensor], int, int]:
    """Return the gradients on this rank after all microbatches, the number of additions, and of gradients' storages.

    missing: the microbatch in which `gain` gets no gradient.
    """
    torch.manual_seed(0)
    net = Net()
    axes = {"replicas": replicas, "ranks": world // replicas} if replicas > 1 else {"ranks": world}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    unit = fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=getattr(torch, reduce)))
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    if summing:
        unit.set_custom_reduce_scatter(SummingReduceScatter(unit))
    additions = Additions()
    for index in range(MICROBATCHES):
        unit.set_requires_all_reduce(index == MICROBATCHES - 1)
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * index + rank))
        loss = unit(x, index != missing)
        with additions:
            loss.backward()
    gradients = [local(parameter.grad) for parameter in unit.parameters() if parameter.grad is not None]
    storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    return [gradient.clone() for gradient in gradients], additions.number, len(storages)


def both(
    reduce: str = "float32", missing: int | None = None, replicas: int = 1
) -> tuple[list[Any], list[Any]]:
    """Return each rank's results with FSDP2's own accumulation, and with forge's. All gradients are equal bit by bit."""
    world = 2 * replicas
    plain, summed = (
        run_ranks(_accumulated, world, reduce, missing, replicas, summing) for summing in (False, True)
    )
    for (expected, *_), (found, *_) in zip(plain, summed, strict=True):
        assert len(found) == len(expected) == PARAMETERS
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return plain, summed


def test_a_unit_adds_its_gradients_in_one_operation() -> None:
    for (_, of_each, _), (_, of_unit, storages) in zip(*both(), strict=True):
        assert of_each == (MICROBATCHES - 1) * PARAMETERS
        assert of_unit == MICROBATCHES - 1 and storages == 1


@pytest.mark.parametrize("missing", range(MICROBATCHES))
def test_a_parameter_may_have_no_gradient_in_a_microbatch(missing: int) -> None:
    both(missing=missing)


def test_sums_are_in_the_storage_dtype_if_it_is_wider() -> None:
    """FSDP2 then makes the sums parameter by parameter."""
    for (_, of_each, _), (_, additions, _) in zip(*both(reduce="bfloat16"), strict=True):
        assert additions == of_each


def test_replicas_keep_their_unreduced_sums() -> None:
    both(replicas=2)
