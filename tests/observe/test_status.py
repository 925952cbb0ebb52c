import json
import os
import socket

from forge.observe.status import write_status


def test_the_status_says_how_the_run_stands_and_who_runs_it(tmp_path):
    path = tmp_path / "status.json"
    write_status(path, state="running", step=3, reason="", exit_code=None)
    write_status(path, state="stopped", step=4, reason="SIGTERM", exit_code=75)
    status = json.loads(path.read_text())
    assert status.pop("time").endswith("+00:00")
    assert status == {
        "state": "stopped",
        "step": 4,
        "reason": "SIGTERM",
        "exit_code": 75,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_finds_the_old_or_the_new_status_whole(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    write_status(path, state="running", step=1, reason="", exit_code=None)
    seen = []
    replace = os.replace

    def look_then_replace(source, target):
        seen.append((json.loads(path.read_text())["step"], json.loads(source.read_text())["step"]))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look_then_replace)
    write_status(path, state="running", step=2, reason="", exit_code=None)
    assert seen == [(1, 2)]


def test_a_full_disk_costs_a_warning_and_leaves_the_old_status(tmp_path, monkeypatch, caplog):
    path = tmp_path / "status.json"
    write_status(path, state="running", step=1, reason="", exit_code=None)

    def full(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    write_status(path, state="running", step=2, reason="", exit_code=None)
    assert json.loads(path.read_text())["step"] == 1
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == [path]
