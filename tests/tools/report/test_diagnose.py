"""A diagnosis says what happened first, on which rank, and what to try. Each fault of the table is named after its own test
too (tests/support/diagnosed.py), from the directory that the real run left."""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from forge.observe.log import reset_logging, setup_logging
from forge.runtime.errors import UserError
from forge.tools.report.diagnose import diagnose
from forge.tools.report.rules import RULES
from forge.tools.report.stacks import odd_ranks, read_collectives, standing
from tests.support.recorded import write_lines

STACK = """rank {rank}: step of step 5 has taken 10.0 s, and resilience.step_timeout_s = 10

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
    """Two ranks, of which the second sleeps, as tests/faults/test_hangs.py leaves them."""
    logs = folder / "logs"
    logs.mkdir(parents=True)
    reason = "step of step 5 has taken 10.0 s, and resilience.step_timeout_s = 10"
    at = "2026-01-01T00:00:"
    write_lines(
        folder / "events.jsonl",
        [
            {"time": at + "00+00:00", "event": "started", "world_size": 2},
            {"time": at + "01+00:00", "event": "fresh", "step": 0},
            {"time": at + "20+00:00", "event": "failed", "step": 4, "reason": reason, "exit_code": 76},
            {"time": at + "21+00:00", "event": "watchdog", "step": 5, "reason": reason, "cause": ""},
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


def test_of_ranks_that_hung_the_one_outside_a_collective_is_named(tmp_path) -> None:
    text = diagnose(hung(tmp_path / "run"))
    assert "failed at step 4, exit code 76" in text
    assert "WHAT HAPPENED FIRST: a phase outlasted its bound: a rank hangs\nRANK: 1\n" in text
    assert "rank 0: count_tokens (parallel/model.py:204), waiting in all_reduce" in text
    assert (
        "rank 1: fault_point (forge/runtime/fault.py:60), in no collective   <- the others wait for it"
        in text
    )
    assert "last collective: gloo:all_reduce, number 7 of its group: scheduled" in text


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
def test_a_run_that_reports_no_end_runs_or_was_killed(tmp_path, alive: bool) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / ".partial-step-00000004").mkdir(parents=True)
    write_lines(run / "events.jsonl", [{"time": "2026-01-01T00:00:00+00:00", "event": "started"}])
    (run / "status.json").write_text(json.dumps({"state": "running", "step": 3}))
    pid = os.getpid() if alive else 2**22 + 1  # beyond the largest number of a process
    (run / ".lock").write_text(json.dumps({"host": socket.gethostname(), "pid": pid, "started": ""}))
    text = diagnose(run)
    assert (f"still running, as process {pid}" in text) is alive
    assert ("the processes were killed during a save (.partial-step-00000004 was left)" in text) is not alive


def test_what_is_no_run_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="is not the directory of a run"):
        diagnose(tmp_path)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("ids.bin: has 32 tokens, and one sequence needs train.seq_len + 1 = 33", "damaged data"),
        ("shards: holds token id 257, and model.vocab_size is 64", "damaged data"),
        (
            "no evaluation at step 4: held.bin: token id 999 at byte 330 is not below",
            "something beside training",
        ),
        ("rollbacks.json failed on rank 0: OSError: [Errno 28] No space left on device", "a disk is full"),
        ("saving step 4 failed: [Errno 28] No space left on device", "a save failed"),
        ("2 saves in a row have failed, the last: No space left on device", "too many saves"),
        ("no sample at step 4: CUDA out of memory", "something beside training"),
        ("out of memory in step 1; what takes it and three keys to change are above", "out of memory"),
        ("rank 1: step of step 5: OSError: [Errno 28] injected", None),
        ("s3://data/SIGIR/a.bin: no answer for 3 s; trying again", None),
        ("/data/SIGTERM/a.bin: no answer for 3 s; trying again", None),
        ("https://peerless.example/a: no answer for 3 s; trying again", None),
        ("/data/by peer/a.bin and /scratch/peer/b: trying again", None),
        ("SIGTERM: stopping after this step", "stopped on request"),
        ("stopped by SIGUSR1, after step 4", "stopped on request"),
        ("all_reduce failed: Connection closed by peer [10.0.0.2]:4242", "a rank was killed"),
        ("Read error: the remote peer has left", "a rank was killed"),
    ],
)
def test_the_cause_that_a_message_states_goes_before_what_it_contains(message: str, name: str | None) -> None:
    found = next((rule.name for rule in RULES if rule.pattern.search(message)), None)
    assert found is None if name is None else str(found).startswith(name)


@pytest.mark.parametrize(
    ("code", "remedy"), [(2, "Fix what the message names"), (1, "Read the end of the logs")]
)
def test_what_no_rule_knows_is_quoted_with_what_its_exit_code_asks_for(
    tmp_path, code: int, remedy: str
) -> None:
    write_lines(
        tmp_path / "events.jsonl",
        [
            {"time": "2026-01-01T00:00:00+00:00", "event": "started"},
            {"time": "2026-01-01T00:00:01+00:00", "event": "failed", "step": 0, "reason": "a new mistake"},
        ],
    )
    status = {"state": "failed", "step": 0, "reason": "a new mistake", "exit_code": code}
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert f"WHAT HAPPENED FIRST: a new mistake\nWHAT TO TRY: {remedy}" in diagnose(tmp_path)


DIES = "2026-01-01 00:00:02.000 rank {rank} ERROR forge: {text}\n"


def killed(folder: Path, **logs: str) -> Path:
    """A run on three ranks that reported no end, with a message of each of some ranks."""
    write_lines(folder / "events.jsonl", [{"time": "2026-01-01T00:00:00+00:00", "event": "started"}])
    (folder / "status.json").write_text(json.dumps({"state": "running", "step": 3}))
    (folder / "logs").mkdir()
    for rank, text in logs.items():
        (folder / "logs" / f"rank-{rank[1]}.log").write_text(DIES.format(rank=rank[1], text=text))
    return folder


def test_of_a_rank_that_died_the_one_is_named_that_did_not_answer_and_not_who_lost_it(tmp_path) -> None:
    """Rank 1 loses its connection first, and knows no more."""
    logs = {"r1": "Connection closed by peer", "r0": "no answer from rank 2, killed or hung; the others end"}
    run = killed(tmp_path, **logs)
    failed = {
        "time": "2026-01-01T23:00:05+00:00",
        "event": "failed",
        "step": 3,
        "reason": "no answer from rank 2",
    }
    started = {"time": "2025-12-31T00:00:00+00:00", "event": "started"}
    write_lines(run / "events.jsonl", [started, failed])
    (run / "status.json").write_text(
        json.dumps({"state": "failed", "step": 3, "reason": "x", "exit_code": 1})
    )
    assert "WHAT HAPPENED FIRST: a rank was killed, or died\nRANK: 2\n" in diagnose(run)


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo", "UTC"])
def test_a_log_of_another_time_zone_is_read_as_the_time_that_it_gives(
    tmp_path, monkeypatch, zone: str
) -> None:
    """Written in one zone by logging itself, and read in another; the logs of before had no offset."""
    events = [{"time": "2026-01-01T00:00:00+00:00", "event": "started", "world_size": 3}]
    failed = {
        "event": "failed",
        "time": "2026-01-01T00:00:09+00:00",
        "step": 3,
        "reason": "no answer from rank 2",
    }
    write_lines(tmp_path / "events.jsonl", [*events, failed])
    (tmp_path / "status.json").write_text(json.dumps({"state": "failed", "step": 3, "reason": "x"}))
    try:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        setup_logging(1, tmp_path / "logs")
        record = logging.LogRecord("forge", logging.ERROR, "x.py", 1, "out of memory in step 1", None, None)
        record.created = datetime(2026, 1, 1, 0, 0, 5, tzinfo=UTC).timestamp()
        logging.getLogger("forge").handle(record)
        reset_logging()
        monkeypatch.setenv("TZ", "Australia/Sydney")
        time.tzset()
        assert "WHAT HAPPENED FIRST: out of memory\nRANK: 1\n  00:00:05 UTC" in diagnose(tmp_path)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_rank_0_which_reports_nothing_is_named_by_the_others(tmp_path) -> None:
    run = killed(tmp_path, r1="the store through which the ranks met is gone")
    write_lines(run / "events.jsonl", [{"time": "2025-12-31T00:00:00+00:00", "event": "started"}])
    assert "the run reported no end\nRANK: 0, which the others report lost\n" in diagnose(run)
