"""Tokens to experts on other ranks and back.

    sort by expert | counts to their ranks | rows to their experts | compute | rows back | weigh and add up

Each rank sends a row for each choice of its tokens and none is padded: what crosses the network are the counts, in one
small exchange, and the rows, there and back (Lepikhin et al. 2020, "GShard"; dropless as in Gale et al. 2022,
"MegaBlocks"). How many rows go where is all that the host has to know, and the only thing that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.nn import functional as F

from forge import compat
from forge.model.dispatch import Plan, combine, sort_by_expert, spread


class AllToAllDispatcher:
    """The ranks of `group` have equally many experts each, in rank order; a Dispatcher in the sense of the model."""

    def __init__(self, group: dist.ProcessGroup, n_experts: int):
        self.group, self.n_experts = group, n_experts

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        plan = sort_by_expert(experts, self.n_experts)
        leaving = plan.counts.view(self.group.size(), -1)  # [ranks, experts of each]
        arriving = functional.wait_tensor(functional.all_to_all_single(leaving, None, None, self.group))
        sends, receives = torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()

        rows, sent = spread(x, plan), sum(sends)
        # Dropped choices come last; they stay here and count as zeros.
        rows = compat.all_to_all(rows[:sent], self.group, receives, sends)
        here = _by_local_expert(arriving, sum(receives))
        rows = spread(compute(spread(rows, here), here.counts), _inverse(here))
        rows = compat.all_to_all(rows, self.group, sends, receives)
        return combine(F.pad(rows, (0, 0, 0, experts.numel() - sent)), weights, plan)


def _by_local_expert(arriving: Tensor, total: int) -> Plan:
    """The plan for `total` rows that came sorted by rank, then expert; arriving int64 `[ranks, local experts]`."""
    ranks, n_local = arriving.shape
    experts = torch.arange(n_local, device=arriving.device).repeat(ranks)
    # With the total known the host does not wait for the counts.
    experts = experts.repeat_interleave(arriving.flatten(), output_size=total)
    return sort_by_expert(experts.unsqueeze(1), n_local)


def _inverse(plan: Plan) -> Plan:
    """The plan that undoes a permutation."""
    return Plan(plan.places.squeeze(1), plan.order.unsqueeze(1), plan.counts)
