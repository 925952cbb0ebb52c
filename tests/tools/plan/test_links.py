"""Bytes of collectives on each link, by hand arithmetic."""

import pytest

from forge.tools.plan.collectives import Collective
from forge.tools.plan.estimate import Spent
from forge.tools.plan.hardware import Hardware, Link
from forge.tools.plan.links import Span, cost_of, message_seconds

GPU = Hardware(
    card="some",
    memory_gib=1.0,
    memory_gb_per_s=1000.0,
    cards_per_node=4,
    node=Link(gb_per_s=100.0, latency_us=1.0),
    cluster=Link(gb_per_s=10.0, latency_us=10.0),
)
NODES_OF_EIGHT = GPU.model_copy(
    update={
        "cards_per_node": 8,
        "node": Link(gb_per_s=450.0, latency_us=0.0),
        "cluster": Link(gb_per_s=50.0, latency_us=0.0),
    }
)


def seconds(kind: str, ranks: list[int], hardware: Hardware = GPU, size: int = 10**9) -> float:
    return cost_of(Collective(kind, size), ranks, hardware).seconds


def test_a_ring_moves_its_bytes_over_the_slowest_link() -> None:
    assert seconds("all_gather", [3]) == 0
    assert seconds("all_gather", [0, 1]) == pytest.approx(1e-6 + 0.5 / 100)
    assert seconds("all_reduce", [0, 1, 2, 3]) == pytest.approx(1e-6 + 2 * 0.75 / 100)
    # One GPU per node uses one NIC; two GPUs per node spread the ring's bytes over two NICs.
    assert seconds("all_gather", [0, 4]) == pytest.approx(1e-5 + 0.5 / 10)
    assert seconds("reduce_scatter", [0, 1, 4, 5]) == pytest.approx(1e-5 + 0.75 / 20)
    # The node with fewest ranks is the narrowest place of the ring.
    assert seconds("all_gather", [0, 1, 2, 4]) == pytest.approx(1e-5 + 0.75 / 10)


@pytest.mark.parametrize(("ranks", "expected"), [(64, 8.225e-3), (16, 4.7e-3), (8, 470e6 * 7 / 8 / 450e9)])
def test_an_all_to_all_sends_each_ranks_bytes_to_other_nodes_through_its_own_nic(ranks, expected) -> None:
    """Of 470 MB over 64 ranks of 8 nodes 56 / 64 leave the node, at 50 GB/s."""
    found = seconds("all_to_all", list(range(ranks)), NODES_OF_EIGHT, 470 * 10**6)
    assert found == pytest.approx(expected)


def test_gpus_on_one_nic_each_get_their_share_of_it() -> None:
    shared = GPU.model_copy(update={"cards_per_nic": 2})
    assert seconds("all_gather", [0, 4], shared) == pytest.approx(1e-5 + 0.5 / 5)
    assert seconds("all_gather", [0, 1, 4, 5], shared) == pytest.approx(1e-5 + 0.75 / 10)
    assert seconds("all_to_all", [0, 4], shared) == pytest.approx(1e-5 + 0.5 / 5)
    assert message_seconds(10**9, 4, shared) == pytest.approx(1e-5 + 0.2)
    assert message_seconds(10**9, 1, shared) == pytest.approx(1e-6 + 0.01)


def test_every_rank_of_a_ring_adds_a_hop() -> None:
    hops = {"node": Link(gb_per_s=100.0, latency_us=1.0, hop_us=2.0)}
    hops["cluster"] = Link(gb_per_s=10.0, latency_us=10.0, hop_us=4.0)
    hardware = GPU.model_copy(update=hops)
    # Eight ranks of two nodes: one hop between the nodes and six inside of them.
    assert seconds("all_gather", list(range(8)), hardware, 0) == pytest.approx(1e-6 * (10 + 6 * 2 + 4))
    # A tree over four nodes, up and down.
    assert seconds("all_reduce", list(range(16)), hardware, 0) == pytest.approx(1e-6 * (10 + 6 * 2 + 4 * 4))
    assert seconds("all_to_all", list(range(8)), hardware, 0) == pytest.approx(1e-5)


def test_links_are_as_fast_as_collectives_reach() -> None:
    slower = GPU.model_copy(
        update={
            "node": Link(gb_per_s=100.0, latency_us=1.0, efficiency=0.5),
            "cluster": Link(gb_per_s=10.0, latency_us=10.0, efficiency=0.5),
        }
    )
    assert seconds("all_gather", [0, 1], slower) == pytest.approx(1e-6 + 0.5 / 50)
    assert message_seconds(10**9, 4, slower) == pytest.approx(1e-5 + 0.2)


def test_a_reduce_scatter_on_a_cpu_is_an_all_reduce() -> None:
    cpu = GPU.model_copy(update={"card": ""})
    assert seconds("reduce_scatter", [0, 1], cpu) == seconds("all_reduce", [0, 1], cpu)
    assert seconds("reduce_scatter", [0, 1]) == seconds("all_gather", [0, 1])


def test_collectives_on_one_nic_do_not_overlap() -> None:
    exchange = cost_of(Collective("all_to_all", 10**9), [0, 4], GPU)
    gather = cost_of(Collective("all_gather", 10**9), [0, 4], GPU)
    both = Spent(0.0, exchange.seconds, gather.seconds, 0.0, exchange.network + gather.network)
    assert both.total == pytest.approx(0.5 / 10 + 0.5 / 10)
    assert str(Span.of([0, 4], GPU)) == "2 nodes, 1 NIC each" and str(Span.of([0, 1], GPU)) == "node"
