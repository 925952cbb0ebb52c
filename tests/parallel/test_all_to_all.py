"""All-to-alls in the background: values, and what runs meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge.model.experts import RowGroups
from forge.parallel.all_to_all import AsyncAllToAll
from forge.parallel.dispatch import AllToAllDispatcher, NodeDispatcher
from tests.support.harness import run_ranks

DIM, TOKENS, TOP_K, N_EXPERTS = 4, 16, 2, 4


def _there_and_back(rank: int, world: int) -> None:
    sends, receives = ([1, 2], [1, 3]) if rank == 0 else ([3, 0], [2, 0])
    rows = (torch.arange(12.0).view(3, DIM) + 100 * rank).requires_grad_()
    call = AsyncAllToAll(dist.group.WORLD, receives, sends)
    call.start(rows)
    found = call.finish()
    own, other = torch.arange(12.0).view(3, DIM), torch.arange(12.0).view(3, DIM) + 100
    assert torch.equal(found, torch.cat([own[:1], other]) if rank == 0 else own[1:])
    weights = torch.arange(1.0, sum(receives) + 1).unsqueeze(1) + 10 * rank
    (found * weights).sum().backward()
    # Row 0 of rank 0 stays; its other rows are rows 0 and 1 of rank 1.
    expected = [1.0, 11.0, 12.0] if rank == 0 else [2.0, 3.0, 4.0]
    assert rows.grad is not None and rows.grad[:, 0].tolist() == expected
    assert call.arrival is None


@pytest.mark.processes
def test_rows_arrive_and_their_gradients_return() -> None:
    run_ranks(_there_and_back, 2)


class InFlight(TorchDispatchMode):
    """Count the products that run while an all-to-all of rows is in flight, and the others."""

    def __init__(self) -> None:
        super().__init__()
        self.flying: set[int] = set()
        self.hidden = self.alone = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name == "all_to_all_single" and args[0].shape[-1] == DIM:
            self.flying.add(output.untyped_storage()._cdata)
        elif name == "wait_tensor":
            self.flying.discard(output.untyped_storage()._cdata)
        elif name == "mm":
            self.hidden += bool(self.flying)
            self.alone += not self.flying
        return output


def _products(rank: int, world: int, nodes: int, parts: int) -> tuple[int, int]:
    """Return the numbers of products during all-to-alls and outside of them, in forward and backward."""
    if nodes == 1:
        dispatch: Any = AllToAllDispatcher(dist.group.WORLD, N_EXPERTS, parts)
    else:
        across = dist.new_subgroups_by_enumeration([[0, 1]])[0]
        within = dist.new_subgroups_by_enumeration([[0], [1]])[0]
        dispatch = NodeDispatcher(across, within, N_EXPERTS, parts)
    weight = torch.eye(DIM).requires_grad_()

    def compute(rows: Tensor, groups: RowGroups) -> Tensor:
        return rows @ weight

    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, DIM, generator=generator).requires_grad_()
    experts = torch.rand(TOKENS, N_EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
    with InFlight() as seen:
        out = dispatch(x, experts, torch.full((TOKENS, TOP_K), 0.5), compute)
        out.sum().backward()
    torch.testing.assert_close(out, x)
    assert not seen.flying
    return seen.hidden, seen.alone


@pytest.mark.processes
@pytest.mark.parametrize("nodes", [1, 2])
def test_with_two_parts_every_product_runs_during_an_all_to_all(nodes: int) -> None:
    # A product in forward and two in backward, per part.
    assert run_ranks(_products, 2, nodes, 1) == [(0, 3)] * 2
    assert run_ranks(_products, 2, nodes, 2) == [(6, 0)] * 2
