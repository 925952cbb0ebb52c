"""Restarts of the elastic agent."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from forge.tools.elastic.agent import _Agent


@pytest.mark.parametrize(
    ("number", "code", "left"), [("0", 2, 0), ("0", 77, 0), ("0", 1, 5), ("1", 2, 5), ("0", None, 5)]
)
def test_only_a_refusal_of_the_first_start_ends_the_agent(
    monkeypatch, tmp_path, number: str, code: int | None, left: int
) -> None:
    """Later, shared storage may be missing for a while: the agents repeat the restart."""
    assert restarts_left(monkeypatch, _agent(monkeypatch, tmp_path / "status.json"), number, code) == left


def _agent(monkeypatch, status: Path) -> _Agent:
    def begin(agent: _Agent, *_: object) -> None:
        agent._remaining_restarts = 5

    monkeypatch.setattr(LocalElasticAgent, "__init__", begin)
    return _Agent(None, status)  # type: ignore[arg-type]


def restarts_left(monkeypatch, agent: _Agent, number: str, code: int | None) -> int:
    failures = {} if code is None else {0: SimpleNamespace(exitcode=code)}
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: SimpleNamespace(failures=failures))
    monkeypatch.setenv("FORGE_ROUND", number)
    agent._monitor_workers(None)  # type: ignore[arg-type]
    return agent._remaining_restarts


@pytest.mark.parametrize(
    ("cause", "code", "left"),
    [("bad_steps", 1, 0), ("spike", 1, 0), ("copies_differ", 1, 5), ("killed", 1, 5), ("bad_steps", None, 5)],
)
def test_a_run_that_roll_backs_have_not_helped_is_not_restarted(
    monkeypatch, tmp_path, cause: str, code: int | None, left: int
) -> None:
    path = tmp_path / "status.json"
    agent = _agent(monkeypatch, path)
    path.write_text(json.dumps({"state": "failed", "cause": cause}))
    assert restarts_left(monkeypatch, agent, "3", code) == left
    # The status of an earlier command says nothing about this one.
    assert restarts_left(monkeypatch, _agent(monkeypatch, path), "3", code) == 5
