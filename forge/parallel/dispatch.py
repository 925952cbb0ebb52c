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

With `parallel.ep_overlap`, both divide a microbatch's tokens into two parts. Rows of one part travel while the experts
compute the other part (forge/parallel/all_to_all.py), in forward and in backward. The experts' weights get a gradient from
each part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from forge.model import host
from forge.model.dispatch import EAGER, DispatchPlan, Kernels, add_up, combine, permute, spread, take
from forge.model.experts import RowGroups
from forge.parallel.all_to_all import AsyncAllToAll, Send
from forge.runtime import compat


class AllToAllDispatcher:
    """A Dispatcher (forge/model/dispatch.py) for experts distributed over `group`.

    Each rank has the same number of consecutive experts. parts: number of parts of a microbatch's tokens, to overlap
    transfers with computation. Calls are collective over `group`, in forward and in backward.
    """

    def __init__(self, group: dist.ProcessGroup, n_experts: int, parts: int = 1):
        self.group, self.n_experts, self.parts = group, n_experts, parts
        # An extension point: the planner has no data and therefore no counts, so it replaces this function.
        self.sizes = sizes_from_counts
        self.kernels = EAGER

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, compute: Callable[[Tensor, RowGroups], Tensor]
    ) -> Tensor:
        """x `[tokens, dim]` -> for each token the sum of its experts' outputs times its weights, `[tokens, dim]`.

        experts int64 and weights `[tokens, top_k]`. compute: as for `Dispatcher`.
        """
        parts = split_tokens(self.parts, x, experts, weights)
        # Rows are sorted by expert and therefore by rank. The device sorts while the host waits for the counts.
        spreads = [spread(own, chosen, self.n_experts, self.kernels) for own, chosen, _ in parts]
        plans = [plan for _, plan in spreads]
        # Numbers of rows. leaving: to each expert of each rank. arriving: from each rank to each expert of this rank.
        leaving = _side_by_side([plan.counts.view(self.group.size(), -1) for plan in plans])
        arriving = exchange(leaving, self.group)  # [ranks, parts, experts of a rank]
        sizes = self.sizes(leaving, arriving)
        # Sent rows are freed before the experts compute, because nothing but `spreads` refers to them.
        trips = [
            RoundTrip(spreads.pop(0)[0], own, sends, receives, self.group, self.kernels)
            for own, (sends, receives) in zip(arriving.unbind(1), sizes, strict=True)
        ]
        for trip in trips:
            trip.compute(compute)
        outputs = [
            combine(trip.finish(), weights, plan, self.kernels)
            for trip, plan, (_, _, weights) in zip(trips, plans, parts, strict=True)
        ]
        return _joined(outputs)


class RoundTrip:
    """Rows go to the ranks of their experts, and results come back. The constructor starts sending the rows. Collective.

    rows `[n, dim]`: sorted by expert; rows past `sum(sends)` have no expert and are not sent. sends: number of rows for
    each rank. receives: number of rows from each rank. arriving: number of rows from each rank for each local expert,
    int64 `[ranks, local experts]`.
    """

    def __init__(
        self,
        rows: Tensor,
        arriving: Tensor,
        sends: list[int],
        receives: list[int],
        group: dist.ProcessGroup,
        kernels: Kernels,
    ):
        if sum(sends) < rows.shape[0]:
            rows = rows[: sum(sends)]
        self._there, self._back = AsyncAllToAll(group, receives, sends), AsyncAllToAll(group, sends, receives)
        self._there.start(rows)
        # Rows arrive sorted by rank; the experts need them sorted by expert.
        self._plan = kernels.group(arriving, sum(receives))

    def compute(self, function: Callable[[Tensor, RowGroups], Tensor]) -> None:
        """Wait for the rows, apply `function` to the rows of the local experts, and start sending the results back."""
        order, places, counts, ends = self._plan
        rows = function(permute(self._there.finish(), order, places), RowGroups(counts, ends))
        self._back.start(permute(rows, places, order))

    def finish(self) -> Tensor:
        """Wait for the results of the sent rows, and return them in the order of these rows, `[n, dim]`."""
        return self._back.finish()


def split_tokens(parts: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split `tensors` `[tokens, ...]` along tokens. Return a tuple of tensors for each part."""
    if parts == 1:
        return [tensors]
    return list(zip(*(x.split(part_sizes(x.shape[0], parts)) for x in tensors), strict=True))


def part_sizes(tokens: int, parts: int) -> list[int]:
    """Return the size of each part of `tokens` tokens or rows. The sizes differ by at most one."""
    return [tokens // parts + (part < tokens % parts) for part in range(parts)]


def _side_by_side(numbers: list[Tensor]) -> Tensor:
    """Stack tensors `[ranks, ...]`, one per part, into one contiguous tensor `[ranks, parts, ...]`."""
    return torch.stack(numbers, 1) if len(numbers) > 1 else numbers[0].unsqueeze(1)


def _joined(outputs: list[Tensor]) -> Tensor:
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def exchange(numbers: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row r of `numbers` `[ranks, ...]` to rank r. Return the received rows. Collective. Not differentiable."""
    return compat.start_all_to_all(numbers, group)()


def sizes_from_counts(leaving: Tensor, arriving: Tensor) -> list[tuple[list[int], list[int]]]:
    """Return two lists for each part: the number of rows to send to each rank and to receive from each rank.

    leaving, arriving: rows per expert, int64 `[ranks, parts, local experts]`. Synchronises with the device, except in
    recomputation.
    """
    sends, receives = host.read(leaving, arriving)
    return [
        ([sum(rank[part]) for rank in sends], [sum(rank[part]) for rank in receives])
        for part in range(leaving.shape[1])
    ]


class NodeDispatcher:
    """A Dispatcher for experts distributed over nodes. It sends a token to each node at most once.

    across: the ranks with this rank's local rank, one per node. within: the ranks of this node. Each rank has the same
    number of consecutive experts, in the order of nodes and of ranks within a node. parts: as for `AllToAllDispatcher`.
    """

    def __init__(self, across: dist.ProcessGroup, within: dist.ProcessGroup, n_experts: int, parts: int = 1):
        self.across, self.within, self.parts = across, within, parts
        self.experts_of_node = n_experts // across.size()
        self.sizes = node_sizes_from_counts
        self.kernels = EAGER
        # Extension points: send rows to other nodes in forward, and gradients of their results in backward. float8 sends
        # codes.
        self.send_rows: Send = compat.start_all_to_all
        self.send_gradients: Send = compat.start_all_to_all

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, compute: Callable[[Tensor, RowGroups], Tensor]
    ) -> Tensor:
        """x `[tokens, dim]` -> for each token the sum of its experts' outputs times its weights, `[tokens, dim]`.

        experts int64 and weights `[tokens, top_k]`. compute: as for `Dispatcher`.
        """
        nodes = self.across.size()
        parts = split_tokens(self.parts, x, experts, weights)
        visits = [
            self.kernels.plan(first_visits(chosen // self.experts_of_node, nodes), nodes)
            for _, chosen, _ in parts
        ]
        # For each node: the number of rows sent to it from this rank, and the number of choices of each of its experts.
        wanted = [_counts(chosen, nodes * self.experts_of_node).view(nodes, -1) for _, chosen, _ in parts]
        to_nodes = [plan.counts.unsqueeze(1) for plan in visits]
        leaving = _side_by_side([torch.cat(pair, 1) for pair in zip(to_nodes, wanted, strict=True)])
        arriving = exchange(leaving, self.across)  # [nodes, parts, 1 + experts of a node]
        # Numbers of choices to send to each rank of this node, and to receive from each rank.
        leaving_here = _by_rank(arriving[..., 1:].sum(0), self.within.size())
        arriving_here = exchange(leaving_here, self.within)
        sizes = self.sizes(leaving[..., 0], arriving[..., 0], leaving_here, arriving_here)
        trips = [
            NodeRoundTrip(self, part, plan, own, *numbers)
            for part, plan, own, numbers in zip(parts, visits, arriving_here.unbind(1), sizes, strict=True)
        ]
        # While the experts compute one part, rows of the next part arrive at this node, and results of the part before
        # leave it.
        trips[0].enter()
        for trip, following in zip(trips, [*trips[1:], None], strict=True):
            trip.compute(compute)
            if following is not None:
                following.enter()
            trip.leave()
        return _joined([trip.finish() for trip in trips])


class NodeRoundTrip:
    """For `NodeDispatcher`: a part of the tokens goes to other nodes, and results come back. Collective.

    The constructor starts sending the tokens' rows to nodes. Call the methods in the order of their definitions.

    part: (x `[tokens, dim]`, experts int64 `[tokens, top_k]`, weights `[tokens, top_k]`). visits: the plan that sorts
    the tokens by node. arriving: number of rows from each rank of this node for each local expert, int64
    `[ranks, local experts]`. to_nodes, from_nodes: number of rows to and from each node. to_ranks, from_ranks: number
    of rows to and from each rank of this node.
    """

    def __init__(
        self,
        dispatcher: NodeDispatcher,
        part: tuple[Tensor, ...],
        visits: DispatchPlan,
        arriving: Tensor,
        to_nodes: list[int],
        from_nodes: list[int],
        to_ranks: list[int],
        from_ranks: list[int],
    ):
        x, experts, weights = part
        self._dispatcher, self._visits, self._arriving = dispatcher, visits, arriving
        self._to_ranks, self._from_ranks = to_ranks, from_ranks
        across, kernels, number = dispatcher.across, dispatcher.kernels, sum(to_nodes)
        self._there = AsyncAllToAll(across, from_nodes, to_nodes, send=dispatcher.send_rows)
        self._weights_there = AsyncAllToAll(across, from_nodes, to_nodes)
        self._back = AsyncAllToAll(across, to_nodes, from_nodes, send_gradients=dispatcher.send_gradients)
        self._there.start(take(x, visits, number, kernels))
        self._weights_there.start(take(weights, visits, number, kernels))
        chosen = experts[visits.order[:number] // experts.shape[1]]
        self._chosen = compat.start_all_to_all(chosen, across, from_nodes, to_nodes)

    def enter(self) -> None:
        """Wait for the rows of other nodes, and start sending them to the ranks of this node."""
        dispatcher, kernels = self._dispatcher, self._dispatcher.kernels
        rows, self._weights = self._there.finish(), self._weights_there.finish()
        # Only choices of this node's experts are sent within the node. Choices of other nodes' experts come last.
        n_experts = dispatcher.experts_of_node
        chosen = self._chosen() - dispatcher.across.rank() * n_experts
        elsewhere = (chosen < 0) | (chosen >= n_experts)
        self._plan = kernels.plan(chosen.masked_fill(elsewhere, n_experts), n_experts)
        rows = take(rows, self._plan, sum(self._to_ranks), kernels)
        self._trip = RoundTrip(
            rows, self._arriving, self._to_ranks, self._from_ranks, dispatcher.within, kernels
        )

    def compute(self, function: Callable[[Tensor, RowGroups], Tensor]) -> None:
        """Apply `function` to the rows of the local experts, as `RoundTrip.compute` does."""
        self._trip.compute(function)

    def leave(self) -> None:
        """Wait for the results of this node's experts, add them up by token, and start sending the sums back."""
        rows = combine(self._trip.finish(), self._weights, self._plan, self._dispatcher.kernels)
        self._back.start(rows)

    def finish(self) -> Tensor:
        """Wait for the sums of all nodes, and return their sum by token, `[tokens, dim]`."""
        return add_up(self._back.finish(), self._visits, self._dispatcher.kernels)


def _by_rank(numbers: Tensor, ranks: int) -> Tensor:
    """numbers `[parts, experts of a node]` -> `[ranks, parts, experts of a rank]`."""
    return numbers.view(numbers.shape[0], ranks, -1).transpose(0, 1)


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
) -> list[tuple[list[int], list[int], list[int], list[int]]]:
    """Return four lists for each part: the number of rows to and from each node, and to and from each rank of this node.

    to_nodes, from_nodes: rows, int64 `[nodes, parts]`. leaving, arriving: rows, int64 `[ranks, parts, local experts]`.
    Synchronises with the device, except in recomputation.
    """
    to_node, from_node, to_rank, from_rank = host.read(to_nodes, from_nodes, leaving, arriving)
    return [
        (
            [node[part] for node in to_node],
            [node[part] for node in from_node],
            [sum(rank[part]) for rank in to_rank],
            [sum(rank[part]) for rank in from_rank],
        )
        for part in range(to_nodes.shape[1])
    ]
