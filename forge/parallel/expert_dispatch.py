"""All-to-all dispatch: tokens travel to experts on other ranks and back.

    sort by expert | counts to their ranks | rows to their experts | compute | rows back | weigh and add up

Each rank sends one row for each expert that each of its tokens chose, without padding: the counts are sent in one small
exchange, then the rows, there and back (Lepikhin et al. 2020, "GShard"; dropless as in Gale et al. 2022, "MegaBlocks").
The host waits for the device once, for the numbers of rows.
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
    """A Dispatcher (forge/model/dispatch.py) for experts spread over `group`: equally many on each rank, in order."""

    def __init__(self, group: dist.ProcessGroup, n_experts: int):
        self.group, self.n_experts = group, n_experts

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """x `[tokens, dim]`, experts int64 and weights `[tokens, top_k]` -> `[tokens, dim]`."""
        plan = sort_by_expert(experts, self.n_experts)
        # How many rows go to each expert of each rank, and how many come from each rank for the experts here.
        leaving = plan.counts.view(self.group.size(), -1)  # [ranks, experts of each]
        arriving = functional.wait_tensor(functional.all_to_all_single(leaving, None, None, self.group))
        sends, receives = torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()

        # There: rows are sorted by expert, so by rank. Dropped choices come last; they stay here and count as zeros.
        rows, sent = spread(x, plan), sum(sends)
        rows = compat.all_to_all(rows[:sent], self.group, receives, sends)
        # Here: rows came sorted by rank; the experts take them sorted by expert.
        here = _by_local_expert(arriving, sum(receives))
        rows = spread(compute(spread(rows, here), here.counts), _inverse(here))
        # Back, to where each row came from.
        rows = compat.all_to_all(rows, self.group, sends, receives)
        return combine(F.pad(rows, (0, 0, 0, experts.numel() - sent)), weights, plan)


def _by_local_expert(arriving: Tensor, total: int) -> Plan:
    """Return the plan for `total` rows that are sorted by rank, then expert; arriving int64 `[ranks, local experts]`."""
    ranks, n_local = arriving.shape
    experts = torch.arange(n_local, device=arriving.device).repeat(ranks)
    # With the total known the host does not wait for the counts.
    experts = experts.repeat_interleave(arriving.flatten(), output_size=total)
    return sort_by_expert(experts.unsqueeze(1), n_local)


def _inverse(plan: Plan) -> Plan:
    """Return the plan that undoes a permutation."""
    return Plan(plan.places.squeeze(1), plan.order.unsqueeze(1), plan.counts)
