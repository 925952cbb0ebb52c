"""`cost_of`: the seconds of a collective, from the bytes that it sends over the slowest link.

Ranks of one node send over NVLink (`Hardware.node`). Bytes to other nodes use the sender's NIC (`Hardware.cluster`). In
a ring, every node sends all bytes, spread over the NICs of the group's ranks on that node. In an all-to-all, each rank
sends only its own bytes, over its own NIC. All groups of an axis run at the same time, so ranks sharing a NIC divide its
bandwidth.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from math import comb

from forge.config.model import MoEConfig
from forge.tools.plan.collectives import Collective
from forge.tools.plan.hardware import Hardware

# Collectives that move every byte around the ring twice.
TWICE = ("all_reduce",)


@dataclass(frozen=True)
class Cost:
    """Seconds of a collective. node, network: seconds during which the bytes occupy a rank's NVLink and its NIC."""

    seconds: float = 0.0
    node: float = 0.0
    network: float = 0.0

    def times(self, factor: float) -> Cost:
        """Return the cost over links that are `factor` times slower."""
        return Cost(factor * self.seconds, factor * self.node, factor * self.network)


@dataclass(frozen=True)
class Span:
    """The spread of a group over nodes. most, least: the largest and the smallest number of the group's ranks on a node."""

    ranks: int
    nodes: int
    most: int
    least: int

    @classmethod
    def of(cls, ranks: list[int], hardware: Hardware) -> Span:
        """Return the span of `ranks`. Node n holds `cards_per_node` consecutive ranks, from n * cards_per_node."""
        per_node = Counter(rank // hardware.cards_per_node for rank in ranks).values()
        return cls(len(ranks), len(per_node), max(per_node, default=0), min(per_node, default=0))

    def __str__(self) -> str:
        if self.nodes <= 1:
            return "node"
        return f"{self.nodes} nodes, {self.least} NIC{'s' if self.least > 1 else ''} each"


def cost_of(call: Collective, ranks: list[int], hardware: Hardware) -> Cost:
    """Return the cost of `call` among `ranks`, for the slowest rank."""
    span = Span.of(ranks, hardware)
    if span.ranks <= 1:
        return Cost()
    node, nic = bandwidth(hardware)
    if call.kind in ("send", "recv"):  # between the first and the last rank of the group
        return Cost(message_seconds(call.size, ranks[-1] - ranks[0], hardware))
    if call.kind == "all_to_all":
        inside = call.size * (span.most - 1) / span.ranks
        outside = call.size * (span.ranks - span.least) / span.ranks if span.nodes > 1 else 0.0
        inside, outside = inside / node, outside / nic
    else:
        # Gloo implements reduce-scatter as an all-reduce of the whole tensor (pytorch/pytorch#118911).
        twice = call.kind in TWICE or (call.kind == "reduce_scatter" and not hardware.card)
        moved = (2.0 if twice else 1.0) * call.size * (span.ranks - 1) / span.ranks
        inside = moved / node if span.most > 1 else 0.0
        outside = moved / (span.least * nic) if span.nodes > 1 else 0.0
    return Cost(_latency(call, span, hardware) + max(inside, outside), inside, outside)


def bandwidth(hardware: Hardware) -> tuple[float, float]:
    """Return one rank's achieved bandwidth inside its node and to other nodes, both in bytes per second."""
    node, cluster = hardware.node, hardware.cluster
    return (
        1e9 * node.gb_per_s * node.efficiency,
        1e9 * cluster.gb_per_s * cluster.efficiency / hardware.cards_per_nic,
    )


def _latency(call: Collective, span: Span, hardware: Hardware) -> float:
    """Return the latency of a collective, in seconds: its time without the transfer of bytes.

    A ring has a hop for every rank. An all-reduce over several nodes uses a tree between the nodes.
    """
    link = hardware.node if span.nodes == 1 else hardware.cluster
    inside, outside = span.ranks - span.nodes, span.nodes - 1
    if call.kind == "all_to_all":
        inside = outside = 0
    elif call.kind in TWICE and span.nodes > 1:
        inside, outside = 2 * (span.most - 1), 2 * math.ceil(math.log2(span.nodes))
    return 1e-6 * (link.latency_us + inside * hardware.node.hop_us + outside * hardware.cluster.hop_us)


def message_seconds(size: int, apart: int, hardware: Hardware) -> float:
    """Return the seconds of a message of `size` bytes between ranks whose numbers differ by `apart`.

    For the messages of a pipeline, `apart` is the distance of its ends: unless all are on one node, some message leaves it.
    """
    inside = apart < hardware.cards_per_node
    link = hardware.node if inside else hardware.cluster
    return link.latency_us * 1e-6 + size / bandwidth(hardware)[0 if inside else 1]


def visited_nodes(moe: MoEConfig, nodes: int) -> float:
    """Return the expected number of nodes that hold experts of one token, for uniformly random routing.

    nodes: number of nodes among which a layer's experts are divided. With group-limited routing, a token is assumed to use
    an expert of every chosen group, because groups are chosen by their best experts.
    """
    groups, limited = moe.n_expert_groups, moe.n_limited_groups or moe.n_expert_groups
    of_node = groups // nodes  # groups on a node
    if limited < groups and of_node:
        return nodes * (1 - comb(groups - of_node, limited) / comb(groups, limited))
    experts, nodes = moe.n_experts * limited // groups, nodes * limited // groups
    return nodes * (1 - comb(experts - experts // nodes, moe.top_k) / comb(experts, moe.top_k))
