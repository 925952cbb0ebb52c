"""Restarts of the elastic agent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from forge.tools.elastic.agent import _Agent


@pytest.mark.parametrize(
    ("number", "code", "left"), [("0", 2, 0), ("0", 77, 0), ("0", 1, 5), ("1", 2, 5), ("0", None, 5)]
)
def test_only_a_refusal_of_the_first_start_ends_the_agent(
    monkeypatch, number: str, code: int | None, left: int
) -> None:
    """Later, shared storage may be missing for a while: the agents repeat the restart."""
    failures = {} if code is None else {0: SimpleNamespace(exitcode=code)}
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: SimpleNamespace(failures=failures))
    monkeypatch.setenv("FORGE_ROUND", number)
    agent = object.__new__(_Agent)
    agent._remaining_restarts = 5
    agent._monitor_workers(None)  # type: ignore[arg-type]
    assert agent._remaining_restarts == left
