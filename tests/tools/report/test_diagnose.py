"""A diagnosis names the first failure, its rank, and remedies. tests/support/diagnosed.py also diagnoses the run directory
of each fault test."""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from forge.observe.log import reset_logging, setup_logging
from forge.runtime.causes import Cause
from forge.runtime.errors import UserError
from forge.tools.report.diagnose import diagnose
from forge.tools.report.stacks import odd_ranks, read_collectives, standing
from tests.support.recorded import write_lines

STACK = """rank {rank}: step of step 5 has taken 10.0 s; the limit is resilience.step_timeout_s = 10

Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f02 (most recent call first):
  File "/w/forge/resilience/watchdog.py", line 188 in _write_report

Thread 0x00007f03 (most recent call first):
{frames}
  File "/w/forge/train/trainer.py", line 130 in step
"""
WAITING = """  File "/site-packages/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/w/forge/parallel/step/model.py", line 204 in count_tokens"""
ASLEEP = '  File "/w/forge/runtime/fault.py", line 60 in fault_point'


def hung(folder: Path) -> Path:
    """Write the stacks of two ranks, the second asleep, like those of tests/faults/test_hangs.py."""
    logs = folder / "logs"
    logs.mkdir(parents=True)
    reason = "step of step 5 has taken 10.0 s; the limit is resilience.step_timeout_s = 10"
    at = "2026-01-01T00:00:"
    write_lines(
        folder / "events.jsonl",
        [
            {"time": at + "00+00:00", "event": "started", "world_size": 2},
            {"time": at + "01+00:00", "event": "fresh", "step": 0},
            {"time": at + "20+00:00", "event": "failed", "step": 4, "reason": reason, "cause": "watchdog"},
            {"time": at + "21+00:00", "event": "watchdog", "step": 5, "reason": reason, "roll_call": ""},
        ],
    )
    status = {"state": "failed", "step": 4, "reason": reason, "exit_code": 76, "host": "one", "pid": 1}
    (folder / "status.json").write_text(json.dumps(status))
    for rank, frames in enumerate((WAITING, ASLEEP)):
        (logs / f"stacks-rank-{rank}.txt").write_text(STACK.format(rank=rank, frames=frames))
    entries = [
        {"record_id": n, "collective_seq_id": n, "profiling_name": "gloo:all_reduce", "state": "scheduled"}
        for n in (6, 7)
    ]
    (logs / "collectives-rank-0").write_bytes(pickle.dumps({"entries": entries}))
    return folder


def test_among_hanging_ranks_the_one_outside_a_collective_is_named(tmp_path) -> None:
    text = diagnose(hung(tmp_path / "run"))
    assert "failed at step 4, exit code 76" in text
    assert "or the limit is too short [watchdog]\nRANK: 1\n" in text
    assert "rank 0: count_tokens (step/model.py:204), waiting in all_reduce" in text
    assert "rank 1: fault_point (runtime/fault.py:60), in no collective   <- the others wait for it" in text
    assert "last collective: gloo:all_reduce, number 7 of its group: scheduled" in text


def test_stacks_of_an_earlier_start_are_left_out(tmp_path) -> None:
    folder = hung(tmp_path / "run")
    (folder / "logs" / "stacks-rank-2.txt").write_text(STACK.format(rank=2, frames=ASLEEP))
    os.utime(folder / "logs" / "stacks-rank-2.txt", (0, 0))
    text = diagnose(folder)
    assert "RANK: 1\n" in text and "rank 2:" not in text


def test_where_all_ranks_wait_none_is_called_odd() -> None:
    one = standing(STACK.format(rank=0, frames=WAITING))
    assert odd_ranks({0: one, 1: one}) == [] and odd_ranks({0: one}) == []


def test_a_record_of_collectives_cannot_run_code(tmp_path) -> None:
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    (tmp_path / "collectives-rank-0").write_bytes(pickle.dumps(Harmful()))
    assert read_collectives(tmp_path) == {} and not (tmp_path / "made").exists()


@pytest.mark.parametrize("alive", [True, False])
def test_a_run_without_an_end_is_running_or_was_killed(tmp_path, alive: bool) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / ".partial-step-00000004").mkdir(parents=True)
    write_lines(run / "events.jsonl", [{"time": "2026-01-01T00:00:00+00:00", "event": "started"}])
    (run / "status.json").write_text(json.dumps({"state": "running", "step": 3}))
    pid = os.getpid() if alive else 2**22 + 1  # above the largest process id
    (run / ".lock").write_text(json.dumps({"host": socket.gethostname(), "pid": pid, "started": ""}))
    text = diagnose(run)
    assert (f"still running, as process {pid}" in text) is alive
    assert ("reported no end, during a save (.partial-step-00000004 was left)" in text) is not alive
    assert ("[killed]\nRANK: every rank" in text) is not alive


def test_a_folder_without_a_run_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="is not the directory of a run"):
        diagnose(tmp_path)


def test_a_run_without_any_record_is_refused(tmp_path) -> None:
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(UserError, match="recorded nothing"):
        diagnose(tmp_path)


STARTED = {"time": "2026-01-01T00:00:00+00:00", "event": "started", "world_size": 3}


def ended(folder: Path, **fields: Any) -> Path:
    """Write a run on three ranks, failed in step 3, with these fields in its last event."""
    failed = {"time": "2026-01-01T00:00:09+00:00", "event": "failed", "step": 3, "reason": "a mistake"}
    write_lines(folder / "events.jsonl", [STARTED, failed | fields])
    (folder / "status.json").write_text(json.dumps({"state": "failed", "step": 3, "reason": "a mistake"}))
    (folder / "logs").mkdir()
    return folder


def log_line(folder: Path, rank: int, where: str, text: str) -> None:
    line = f"2026-01-01T00:00:05.000+00:00 rank {rank} ERROR {where}: {text}\n"
    (folder / "logs" / f"rank-{rank}.log").write_text(line)


def test_the_recorded_cause_and_ranks_of_the_end_win_over_the_message(tmp_path) -> None:
    run = ended(tmp_path, cause="killed", ranks=[2], reason="https://out-of-memory.example/SIGTERM")
    log_line(run, 1, "forge.run.crash[connection_lost]", "rank 1 failed in step 3")
    text = diagnose(run)
    assert "WHAT HAPPENED FIRST: a rank was killed, died or no longer answers [killed]\nRANK: 2\n" in text
    assert "- a connection to another rank broke [connection_lost] (rank 1)" in text


@pytest.mark.parametrize(
    "message",
    [
        "s3://data/SIGIR/a.bin: no answer for 3 s; trying again",
        "/data/SIGTERM/a.bin: no answer for 3 s; trying again",
        "https://peerless.example/a: no answer for 3 s; trying again",
        "Connection closed by peer, out of memory, No space left on device, step 5 was skipped: SIGTERM",
    ],
)
@pytest.mark.parametrize("quoted", ["", "rank 1 ERROR forge.run.crash[killed:1]: "])
def test_no_message_is_taken_for_a_cause(tmp_path, message: str, quoted: str) -> None:
    write_lines(
        tmp_path / "events.jsonl", [STARTED, STARTED | {"event": "finished", "step": 3, "reason": message}]
    )
    (tmp_path / "status.json").write_text(json.dumps({"state": "finished", "step": 3}))
    (tmp_path / "logs").mkdir()
    log_line(tmp_path, 0, "forge.runtime.remote", quoted + message)
    assert "Nothing ended this run early." in diagnose(tmp_path)


@pytest.mark.parametrize(
    ("code", "cause"), [(2, "configuration"), (76, "watchdog"), (77, "no_checkpoint"), (1, "error")]
)
def test_without_a_recorded_cause_the_exit_code_is_used(tmp_path, code: int, cause: str) -> None:
    text = diagnose(ended(tmp_path, exit_code=code))
    assert f"[{cause}]\n  00:00:09 UTC: failed at step 3: a mistake\nWHAT TO TRY:" in text


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo", "UTC"])
def test_a_logs_own_time_zone_is_used(tmp_path, monkeypatch, zone: str) -> None:
    """The logging module writes the log in one time zone, and the test reads it in another."""
    run = ended(tmp_path)
    try:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        setup_logging(1, run / "logs")
        record = logging.LogRecord("forge", logging.ERROR, "x.py", 1, "it broke in step 1", None, None)
        record.created = datetime(2026, 1, 1, 0, 0, 5, tzinfo=UTC).timestamp()
        record.__dict__ |= Cause.COPIES_DIFFER.of(0, 2)
        logging.getLogger("forge").handle(record)
        reset_logging()
        monkeypatch.setenv("TZ", "Australia/Sydney")
        time.tzset()
        assert "[copies_differ] (rank 0, 2)\n    2026-01-01 00:00:05 UTC: it broke in step 1" in diagnose(run)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_silent_rank_0_is_named_by_the_others(tmp_path) -> None:
    run = ended(tmp_path)
    write_lines(run / "events.jsonl", [STARTED])
    (run / "status.json").write_text(json.dumps({"state": "running", "step": 3}))
    log_line(run, 1, "forge.run.crash[rendezvous_lost]", "the store is gone")
    assert "[killed]\nRANK: 0, which the other ranks report as lost\n" in diagnose(run)


def test_the_end_of_a_start_is_named_before_earlier_smaller_incidents(tmp_path) -> None:
    run = ended(tmp_path)
    events = [
        STARTED,
        STARTED | {"event": "straggler", "rank": 1, "cause": "straggler"},
        STARTED | {"event": "skipped", "step": 2, "cause": "transient"},
        STARTED | {"event": "stopped", "step": 3, "cause": "stopped", "time": "2026-01-01T00:00:09+00:00"},
        STARTED | {"event": "started", "time": "2026-01-01T00:00:10+00:00"},
        STARTED | {"event": "finished", "step": 9, "time": "2026-01-01T00:00:11+00:00"},
    ]
    write_lines(run / "events.jsonl", events)
    (run / "status.json").write_text(json.dumps({"state": "finished", "step": 3}))
    text = diagnose(run)
    places = [text.index(f"[{cause}]") for cause in ("stopped", "transient", "straggler")]
    assert "The latest start ended well" in text and places == sorted(places)
