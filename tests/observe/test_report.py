import json
import os
import socket
from datetime import datetime
from pathlib import Path

import pytest

from forge.observe.report import Reporter
from forge.observe.run_directory import RunDirectory
from forge.runtime.world import World


@pytest.fixture
def reporter(tmp_path: Path) -> Reporter:
    return Reporter(RunDirectory(tmp_path), World(rank=0, size=2, local_rank=0, launcher="python"))


def test_the_status_has_the_runs_state_and_process(tmp_path, reporter):
    reporter.running(3)
    reporter.ended("stopped", "SIGTERM", 75)
    status = json.loads((tmp_path / "status.json").read_text())
    assert status.pop("time").endswith("+00:00")
    assert status == {
        "state": "stopped",
        "step": 3,
        "reason": "SIGTERM",
        "cause": "stopped",
        "exit_code": 75,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "status.json"]


def test_an_event_has_its_time_in_utc_its_kind_and_its_fields(tmp_path, reporter):
    reporter.event("saved", step=3, seconds=0.5)
    again = Reporter(RunDirectory(tmp_path), World(rank=0, size=2, local_rank=0, launcher="python"))
    again.event("resumed")
    saved, resumed = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert datetime.fromisoformat(saved.pop("time")).utcoffset().total_seconds() == 0
    assert saved == {"event": "saved", "step": 3, "seconds": 0.5} and resumed["event"] == "resumed"


@pytest.mark.parametrize(("replaced_after", "made"), [(-1, 1), (None, 1000)])
def test_the_ledger_begins_again_with_a_history_that_replaces_another(
    tmp_path, reporter, replaced_after, made: int
):
    reporter.running(1000)
    again = Reporter(reporter.directory, reporter.world)
    again.begun(0, None, of=1000, new=True, replaced_after=replaced_after)
    again.phases.enter("step", 1)
    again.phases.enter("step", 2)
    again.ended("stopped", "SIGTERM", 75)
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    last = [event for event in events if event["event"] == "goodput"][-1]
    assert last["step"] == made


def test_only_the_first_rank_reports(tmp_path):
    other = Reporter(RunDirectory(tmp_path), World(rank=1, size=2, local_rank=1, launcher="python"))
    other.running(1)
    other.ended("failed", "no reason", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_finds_the_old_or_the_new_status_whole(tmp_path, reporter, monkeypatch):
    reporter.running(1)
    seen = []
    replace = os.replace

    def look_then_replace(source, target):
        seen.append((json.loads(target.read_text())["step"], json.loads(source.read_text())["step"]))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look_then_replace)
    reporter.running(2)
    assert seen == [(1, 2)]


def test_a_full_disk_costs_a_warning_and_leaves_the_old_status(tmp_path, reporter, monkeypatch, caplog):
    reporter.running(1)

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    reporter.running(2)
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 1
    assert "No space left" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
