"""Local decisions of an elastic run's ranks and agents."""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import UTC, datetime

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from forge.config.schema import Resilience
from forge.resilience import elastic, stragglers
from forge.resilience.elastic import exit_code_after_stop, nodes_to_spare
from forge.runtime.errors import FINISHED, STOPPED
from forge.tools.elastic import agent
from forge.tools.elastic.meeting import OVER, Meeting, clock_offset
from forge.tools.elastic.secret import SignedStore, read_secret
from tests.support.harness import run_ranks


def code(rank: int, world: int, reasons: list[str | None], nodes: str, restarts_left: int) -> int:
    os.environ.pop("FORGE_NODES", None)
    if nodes:
        os.environ["FORGE_NODES"] = nodes
    return exit_code_after_stop(lambda: reasons[rank], restarts_left, patience_s=0.1)


@pytest.mark.parametrize(
    "reasons, nodes, restarts_left, codes",
    [
        (
            ["SIGTERM", None],
            "1:2",
            5,
            [FINISHED, STOPPED],
        ),  # another node leaves: this node rejoins the rendezvous
        (["SIGTERM", "SIGUSR1"], "1:2", 5, [FINISHED, FINISHED]),
        (["resilience.time_limit_s = 9 is near", None], "1:2", 5, [FINISHED, FINISHED]),
        (["SIGTERM", None], "", 5, [FINISHED, FINISHED]),
        (["SIGTERM", None], "", 0, [STOPPED, STOPPED]),
    ],
)
def test_only_a_signal_to_some_nodes_of_an_elastic_run_is_not_the_end_of_the_run(
    reasons, nodes, restarts_left, codes
) -> None:
    assert run_ranks(code, 2, reasons, nodes, restarts_left) == codes


def test_a_node_may_leave_while_more_than_the_minimum_remain(monkeypatch) -> None:
    monkeypatch.delenv("FORGE_NODES", raising=False)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    assert nodes_to_spare() == 0
    monkeypatch.setenv("FORGE_NODES", "2:4")
    assert nodes_to_spare() == 1
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert nodes_to_spare() == 0


def test_a_repeatedly_slow_rank_makes_its_node_leave(monkeypatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(stragglers.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(stragglers, "nodes_to_spare", lambda: 1)
    monkeypatch.setattr(stragglers, "leave", lambda: left.append(1))
    hook = stragglers.Stragglers(
        Resilience(drain_stragglers=2), [], torch.device("cpu"), lambda *_, **__: None
    )
    for slow in ({1}, {0}, {1}, {0, 1}):
        assert not left
        hook._drain(10, slow)
    assert left == [1]


@pytest.mark.parametrize(("spare", "leaving"), [(0, []), (1, [2]), (2, [2, 6]), (3, [2, 6])])
def test_slow_nodes_leave_until_the_minimum_remains(monkeypatch, spare: int, leaving: list[int]) -> None:
    """Two ranks of node 1 and one of node 3 are slow. One rank of each node tells its agent."""
    left: list[int] = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(stragglers, "nodes_to_spare", lambda: spare)
    monkeypatch.setattr(stragglers, "leave", lambda: left.append(stragglers.dist.get_rank()))
    for rank in range(8):
        monkeypatch.setattr(stragglers.dist, "get_rank", lambda rank=rank: rank)
        hook = stragglers.Stragglers(
            Resilience(drain_stragglers=1), [], torch.device("cpu"), lambda *_, **__: None
        )
        for _ in range(2):
            hook._drain(10, {6, 3, 2})
    assert left == leaving


def test_the_rendezvous_uses_the_clock_of_its_server(monkeypatch, capsys) -> None:
    monkeypatch.setattr(dynamic_rendezvous, "datetime", None)  # restored after the test
    monkeypatch.setattr(agent, "time", Ahead)
    agent._share_clock(-3 * 3600.0)
    now = dynamic_rendezvous.datetime.now(UTC)
    assert abs((now - datetime.now(UTC)).total_seconds()) < 600
    assert "10800 s ahead" in capsys.readouterr().err


class Ahead:
    """A clock three hours ahead."""

    @staticmethod
    def time() -> float:
        return time.time() + 3 * 3600


@pytest.mark.long
def test_an_agent_learns_its_clock_offset_and_the_rendezvous_ends_with_the_run() -> None:
    held = Meeting(0)
    serving = threading.Thread(target=held.serve, args=(threading.Event(), 0.0))
    serving.start()
    raw = dist.TCPStore("localhost", held.port, is_master=False)
    store = SignedStore(raw, read_secret("localhost", held.port))
    assert abs(clock_offset(store)) < 60
    store.set(OVER, "1")
    serving.join(60)
    assert not serving.is_alive()
    clock_offset(store)  # returns, although the clock stands still
    assert elastic.OWN_SIGNAL_S < 30  # PyTorch's agents kill their ranks after 30 s


@pytest.mark.parametrize(
    "status, code",
    [
        ({"state": "stopped"}, STOPPED),
        ({"state": "stopped", "final": True}, STOPPED),
        ({"state": "finished"}, FINISHED),
        ({}, FINISHED),
    ],
)
def test_a_stopped_run_exits_75_even_if_its_ranks_exit_0(tmp_path, status, code) -> None:
    if status:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "status.json").write_text(json.dumps(status))
    argv = ["--config=debug.toml", "--run.name=mine", f"--run.output_dir={tmp_path}"]
    assert agent.exit_code_at_end(argv) == code
