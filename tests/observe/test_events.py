import errno
import json
import os
from datetime import datetime

from forge.observe.events import EventLog


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_has_its_time_in_utc_its_kind_and_its_fields(tmp_path):
    EventLog(tmp_path / "events.jsonl").write("saved", step=3, seconds=0.5)
    (event,) = read(tmp_path / "events.jsonl")
    assert datetime.fromisoformat(event.pop("time")).utcoffset().total_seconds() == 0
    assert event == {"event": "saved", "step": 3, "seconds": 0.5}


def test_a_later_start_goes_on_in_the_same_file(tmp_path):
    for kind in ("started", "resumed"):
        EventLog(tmp_path / "events.jsonl").write(kind)
    assert [event["event"] for event in read(tmp_path / "events.jsonl")] == ["started", "resumed"]


def test_an_event_after_a_torn_line_stands_on_a_line_of_its_own(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "sta')
    EventLog(path).write("resumed")
    torn, line = path.read_text().splitlines()
    assert torn == '{"event": "sta' and json.loads(line)["event"] == "resumed"


def test_what_a_full_disk_refuses_is_warned_of_once_and_written_later(tmp_path, monkeypatch, caplog):
    events = EventLog(tmp_path / "events.jsonl")
    events.write("a")
    write, calls = os.write, []

    def half_then_full(descriptor, content):
        calls.append(content)
        if len(calls) == 1:
            return write(descriptor, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", half_then_full)
        events.write("b")
        events.write("c")
    assert len(caplog.records) == 1
    events.write("d")
    assert [event["event"] for event in read(tmp_path / "events.jsonl")] == ["a", "b", "c", "d"]
