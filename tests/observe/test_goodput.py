"""The ledger of wall time puts every second into one kind, across kills and restarts."""

import json
import time
from datetime import UTC, datetime, timedelta

import pytest

from forge.observe.goodput import KINDS, Ledger, Past, read_past

BEGIN = datetime(2025, 6, 1, 12, tzinfo=UTC)


class Clock:
    """A stub of the ledger's two clocks."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: BEGIN.timestamp() + self.now)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def walk(ledger: Ledger, clock: Clock, *phases: tuple[str, int, float]) -> None:
    for phase, step, seconds in phases:
        ledger.enter(phase, step)
        clock.now += seconds


def test_each_phase_counts_in_its_kind_and_the_sum_is_wall_time(clock) -> None:
    events: list[dict] = []
    ledger = Ledger(Past(), began=clock.now - 3, report_event=lambda kind, **fields: events.append(fields))
    walk(ledger, clock, ("set-up", 0, 7), ("first step", 1, 5), ("data", 2, 1), ("step", 2, 4))
    walk(ledger, clock, ("save", 2, 2), ("step", 2, 1), ("data", 3, 1), ("step", 3, 4), ("end", 0, 1))
    seconds = ledger.seconds()
    assert seconds["set-up"] == 10 and seconds["first step"] == 5 and seconds["data"] == 2
    assert seconds["steps"] == 9 and seconds["save"] == 3 and sum(seconds.values()) == 29
    assert [event["step"] for event in events] == [1, 2]
    assert "31.0% of 29s" in ledger.table() and "evaluation" not in ledger.table()


def test_repeated_steps_after_a_restart_or_rollback_are_counted_as_repeated(clock) -> None:
    ledger = Ledger(Past(step=3), began=clock.now, report_event=lambda *_, **__: None)
    walk(ledger, clock, ("first step", 2, 1), ("step", 3, 1), ("step", 4, 1), ("step", 5, 1))
    walk(ledger, clock, ("set-up", 5, 1), ("step", 4, 1), ("evaluation", 4, 1), ("step", 4, 1))
    walk(ledger, clock, ("step", 5, 1), ("step", 6, 1), ("end", 0, 0))
    assert ledger.seconds() == dict.fromkeys(KINDS, 0.0) | {
        "first step": 1,
        "steps": 3,
        "repeated steps": 4,
        "set-up": 1,
        "evaluation": 1,
    }


def test_the_time_between_two_processes_is_down(clock) -> None:
    past = Past({"steps": 50.0}, 10, BEGIN + timedelta(seconds=900))
    ledger = Ledger(past, began=clock.now - 20, report_event=lambda *_, **__: None)
    assert ledger.seconds() == dict.fromkeys(KINDS, 0.0) | {"steps": 50, "down": 80, "set-up": 20}


def lines(*events: tuple[float, str, dict]) -> str:
    return "".join(
        json.dumps({"time": (BEGIN + timedelta(seconds=at)).isoformat(), "event": kind, **fields}) + "\n"
        for at, kind, fields in events
    )


def test_the_time_of_a_killed_process_is_counted_from_its_events_and_status(tmp_path) -> None:
    events, status = tmp_path / "events.jsonl", tmp_path / "status.json"
    events.write_text(
        lines(
            (0, "started", {}),
            (5, "fresh", {}),
            (20, "goodput", {"step": 1, "seconds": {"set-up": 5.0, "first step": 15.0}}),
            (50, "saved", {"step": 10}),
        )
        + '{"torn'
    )
    status.write_text(json.dumps({"time": (BEGIN + timedelta(seconds=60)).isoformat(), "step": 14}))
    past = read_past(events, status)
    assert past.seconds == {"set-up": 5, "first step": 15, "steps": 40}
    assert past.step == 14 and past.until == BEGIN + timedelta(seconds=60)


def test_a_process_killed_in_set_up_counts_as_set_up_and_a_missing_file_is_no_past(tmp_path) -> None:
    events, status = tmp_path / "events.jsonl", tmp_path / "status.json"
    assert read_past(events, status) == Past()
    events.write_text(
        lines(
            (0, "started", {}),
            (10, "fallback", {}),
            (100, "started", {}),
            (103, "resumed", {}),
            (110, "skipped", {}),
        )
    )
    past = read_past(events, status)
    assert past.seconds == {"set-up": 13, "down": 90, "steps": 7}


@pytest.mark.parametrize(("replaced_after", "made"), [(-1, 14), (None, 1000)])
def test_a_new_history_repeats_no_step_of_the_replaced_one(tmp_path, replaced_after, made: int) -> None:
    """A run that starts again before its first save replaces no history and does repeat steps."""
    events, status = tmp_path / "events.jsonl", tmp_path / "status.json"
    events.write_text(
        lines(
            (0, "goodput", {"step": 1000, "seconds": {"steps": 900.0}}),
            (5, "fresh", {"step": 0, "new": True, "replaced_after": replaced_after}),
        )
    )
    status.write_text(json.dumps({"time": (BEGIN + timedelta(seconds=60)).isoformat(), "step": 14}))
    past = read_past(events, status)
    assert past.step == made and past.seconds == {"steps": 960}
