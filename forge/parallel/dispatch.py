"""Dispatchers for expert parallelism: experts distributed over ranks (`Dispatcher` in forge/model/dispatch.py).

`AllToAllDispatcher` sends one row for each (token, chosen expert) pair, without padding (Lepikhin et al. 2020,
"GShard"; dropless as in Gale et al. 2022, "MegaBlocks"):

    sort by expert | counts to their ranks | rows to their experts | compute | rows back | weigh and add up

`NodeDispatcher` sends a token once to each node holding experts for it, because the network between nodes is slower
than inside a node (DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.2). On each node, one rank receives the rows: the rank
with the sender's local rank. This rank forwards each row to its experts, multiplies their outputs by the routing
weights, and returns the sum as one row per token. The sum is rounded to the dtype of the rows. With
`precision.float8_dispatch`, inputs of experts and gradients of their outputs travel between nodes as float8 codes.

In both, the host synchronises with the device once per layer and microbatch, to read the numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from forge.model import host
from forge.model.dispatch import EAGER, Kernels, add_up, combine, permute, spread, take
from forge.model.experts import RowGroups
from forge.runtime import compat


class AllToAllDispatcher:
    """A Dispatcher (forge/model/dispatch.py) for experts distributed over `group`.

    Each rank has the same number of consecutive experts.
    Calls are collective over `group`, in forward and in backward.
    """

    def __init__(self, group: dist.ProcessGroup, n_experts: int):
        self.group, self.n_experts = group, n_experts
        # An extension point: the planner has no data and therefore no counts, so it replaces this function.
        self.sizes = sizes_from_counts
        self.kernels = EAGER

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, compute: Callable[[Tensor, RowGroups], Tensor]
    ) -> Tensor:
        """x `[tokens, dim]` -> for each token the sum of its experts' outputs times its weights, `[tokens, dim]`.

        experts int64 and weights `[tokens, top_k]`. compute: as for `Dispatcher`.
        """
        # Rows are sorted by expert and therefore by rank. The device sorts while the host waits for the counts.
        rows, plan = spread(x, experts, self.n_experts, self.kernels)
        # Numbers of rows. leaving: to each expert of each rank. arriving: from each rank to each expert of this rank.
        leaving = plan.counts.view(self.group.size(), -1)  # [ranks, experts of each]
        arriving = exchange(leaving, self.group)
        sends, receives = self.sizes(leaving, arriving)
        # Dropped choices come last; they are not sent and contribute nothing.
        rows = rows[: sum(sends)] if sum(sends) < rows.shape[0] else rows
        rows = through_experts(rows, arriving, sends, receives, self.group, compute, self.kernels)
        return combine(rows, weights, plan, self.kernels)


def through_experts(
    rows: Tensor,
    arriving: Tensor,
    sends: list[int],
    receives: list[int],
    group: dist.ProcessGroup,
    compute: Callable[[Tensor, RowGroups], Tensor],
    kernels: Kernels,
) -> Tensor:
    """Send rows `[n, dim]`, sorted by expert, to the ranks of their experts.

    Return the outputs `[n, dim]`, in the same order.

    Collective over `group`.

    sends: number of rows for each rank. receives: number of rows from each rank. arriving: number of rows from each
    rank for each local expert, int64 `[ranks, local experts]`.
    """
    rows = compat.all_to_all(rows, group, receives, sends)
    # Rows arrive sorted by rank; the experts need them sorted by expert.
    order, places, counts, ends = kernels.group(arriving, sum(receives))
    rows = permute(compute(permute(rows, order, places), RowGroups(counts, ends)), places, order)
    return compat.all_to_all(rows, group, sends, receives)


def exchange(numbers: Tensor, group: dist.ProcessGroup, *sizes: list[int]) -> Tensor:
    """Return the all-to-all of `numbers` over `group`. Collective. Not differentiable.

    sizes: two lists, the number of rows to receive from each rank and to send to each rank. Without `sizes`, every
    rank exchanges equal parts.
    """
    receives, sends = sizes or (None, None)
    return functional.wait_tensor(functional.all_to_all_single(numbers.contiguous(), receives, sends, group))


def sizes_from_counts(leaving: Tensor, arriving: Tensor) -> tuple[list[int], list[int]]:
    """Return two lists: the number of rows to send to each rank and to receive from each rank.

    leaving, arriving: rows per expert, int64 `[ranks, local experts]`. Synchronises with the device, except in
    recomputation.
    """
    sends, receives = ([sum(rank) for rank in ranks] for ranks in host.read(torch.stack([leaving, arriving])))
    return sends, receives


class NodeDispatcher:
    """A Dispatcher for experts distributed over nodes. It sends a token to each node at most once.

    across: the ranks with this rank's local rank, one per node. within: the ranks of this node. Each rank has the same
    number of consecutive experts, in the order of nodes and of ranks within a node.
    """

    def __init__(self, across: dist.ProcessGroup, within: dist.ProcessGroup, n_experts: int):
        self.across, self.within = across, within
        self.experts_of_node = n_experts // across.size()
        self.sizes = node_sizes_from_counts
        self.kernels = EAGER
        # Extension points: the all-to-alls of rows to other nodes and back. float8 sends codes.
        self.send: Callable[..., Tensor] = compat.all_to_all
        self.send_back: Callable[..., Tensor] = compat.all_to_all

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, compute: Callable[[Tensor, RowGroups], Tensor]
    ) -> Tensor:
        """x `[tokens, dim]` -> for each token the sum of its experts' outputs times its weights, `[tokens, dim]`.

        experts int64 and weights `[tokens, top_k]`. compute: as for `Dispatcher`.
        """
        nodes, kernels = self.across.size(), self.kernels
        visits = kernels.plan(first_visits(experts // self.experts_of_node, nodes), nodes)
        # For each node: the number of rows sent to it from this rank, and the number of choices of each of its experts.
        wanted = _counts(experts, nodes * self.experts_of_node).view(nodes, -1)
        leaving = torch.cat([visits.counts.unsqueeze(1), wanted], 1)  # [nodes, 1 + experts of a node]
        arriving = exchange(leaving, self.across)
        # Numbers of choices to send to each rank of this node, and to receive from each rank.
        leaving_here = arriving[:, 1:].sum(0).view(self.within.size(), -1)  # [ranks, experts of each]
        arriving_here = exchange(leaving_here, self.within)
        to_nodes, from_nodes, to_ranks, from_ranks = self.sizes(
            leaving[:, 0], arriving[:, 0], leaving_here, arriving_here
        )
        across = self.across, from_nodes, to_nodes
        rows, row_weights = (take(values, visits, sum(to_nodes), kernels) for values in (x, weights))
        rows, row_weights = self.send(rows, *across), compat.all_to_all(row_weights, *across)
        chosen = exchange(experts[visits.order[: sum(to_nodes)] // experts.shape[1]], *across)
        # Only choices of this node's experts are sent within the node. Choices of other nodes' experts come last.
        chosen = chosen - self.across.rank() * self.experts_of_node
        elsewhere = (chosen < 0) | (chosen >= self.experts_of_node)
        plan = kernels.plan(chosen.masked_fill(elsewhere, self.experts_of_node), self.experts_of_node)
        rows = take(rows, plan, sum(to_ranks), kernels)
        rows = through_experts(rows, arriving_here, to_ranks, from_ranks, self.within, compute, kernels)
        rows = combine(rows, row_weights, plan, kernels)
        return add_up(self.send_back(rows, self.across, to_nodes, from_nodes), visits, kernels)


def _counts(experts: Tensor, n_experts: int) -> Tensor:
    """Count the choices of each expert. experts: int64. Return int64 `[n_experts]`.

    Unlike bincount, this function does not synchronise with the device.
    """
    flat = experts.flatten()
    return flat.new_zeros(n_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:-1]


def first_visits(nodes: Tensor, n_nodes: int) -> Tensor:
    """Return `nodes` with every repetition within a row replaced with `n_nodes`. A token then visits a node once.

    nodes: for each token, the nodes of its chosen experts, int64 `[tokens, top_k]`.
    """
    columns = nodes.unbind(1)
    kept = [columns[0]]
    for j, column in enumerate(columns[1:], start=1):
        again = torch.stack([column == earlier for earlier in columns[:j]]).any(0)
        kept.append(column.masked_fill(again, n_nodes))
    return torch.stack(kept, 1)


def node_sizes_from_counts(
    to_nodes: Tensor, from_nodes: Tensor, leaving: Tensor, arriving: Tensor
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return four lists of numbers of rows: to each node, from each node, to and from each rank of this node.

    to_nodes, from_nodes: rows, int64 `[nodes]`. leaving, arriving: rows, int64 `[ranks, local experts]`. Synchronises with
    the device, except in recomputation.
    """
    numbers = [to_nodes, from_nodes, leaving.sum(1), arriving.sum(1)]
    read = iter(host.read(torch.cat(numbers)))
    first, second, third, fourth = ([next(read) for _ in range(len(one))] for one in numbers)
    return first, second, third, fourth
