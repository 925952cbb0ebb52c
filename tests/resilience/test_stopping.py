"""Stop requests by signals, and a job's time limit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge.resilience.stopping import StopSignals, TimeLimit
from forge.runtime.errors import STOPPED

# The main thread deadlocks in C, on a lock it holds itself, so Python can run no handler.
DEADLOCK = """
import ctypes
from forge.resilience import stopping
stopping.SAME_REQUEST_S = 0.05
with stopping.StopSignals() as signals:
    signals.defer()
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_the_first_signal_is_a_request_with_a_name(name):
    with StopSignals() as signals:
        signals.defer()
        assert signals.reason is None
        os.kill(os.getpid(), signal.Signals[name])
        assert signals.reason == name


def test_a_hangup_under_nohup_is_no_request():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signals.defer()
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.reason is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_request_changes_nothing_but_prints_a_message(capfd, monkeypatch):
    monkeypatch.setattr("forge.resilience.stopping.SAME_REQUEST_S", 0.05)
    with StopSignals() as signals:
        signals.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.reason == "SIGTERM"
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("forge: SIGTERM: stopping") and second.startswith("forge: SIGUSR1: already")


def test_p4_signals_at_once_are_one_request(capfd):
    with StopSignals() as signals:
        signals.defer()
        for _ in range(3):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                os.kill(os.getpid(), number)
        time.sleep(0.2)  # time for the thread that ends this process at a third request
        assert signals.reason == "SIGTERM"
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_closed_stderr_raises_nothing(monkeypatch):
    def gone(descriptor, content):
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", gone)
    with StopSignals() as signals:
        signals.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.reason == "SIGTERM"


def test_handlers_are_restored_and_counting_restarts():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    for _ in range(4):
        with StopSignals() as signals:
            signals.defer()
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.reason == "SIGTERM"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_p4_the_third_request_ends_a_process_hanging_in_c():
    process = subprocess.Popen(
        [sys.executable, "-c", DEADLOCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        process.send_signal(number)
        time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)  # another signal, because a second pending SIGTERM would not count
    _, errors = process.communicate(timeout=240)
    assert process.returncode == STOPPED
    assert "leaving at once" in errors


EARLY = """
import ctypes, os, time
from forge.resilience.stopping import StopSignals
with StopSignals() as early:
    with StopSignals() as signals:
        signals.leaving = lambda reason: print(reason, flush=True)
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
        libc.pthread_mutex_lock(mutex)
        print("ready", flush=True)
        libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_p3_before_the_first_step_a_request_ends_the_process_at_once(rank: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", EARLY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"RANK": rank},
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == STOPPED
    message = "SIGTERM: stopped before the first step; nothing was lost\n"
    assert output == message
    assert errors == (f"forge: {message}" if rank == "0" else "")


def test_p3_train_py_takes_signals_before_it_imports_torch() -> None:
    """The process signals itself at the start of its torch import."""
    early = (
        "import builtins, os, runpy, signal, sys\n"
        "real = builtins.__import__\n"
        "def importing(name, *rest):\n"
        "    if name == 'torch':\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = importing\n"
        "sys.argv = ['train.py', '--help']\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", early], cwd=root, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == STOPPED and done.stdout == ""
    assert done.stderr == "forge: SIGTERM: stopped before the first step; nothing was lost\n"


def test_other_signals_do_not_count():
    previous = signal.signal(signal.SIGUSR2, lambda *_: None)
    with StopSignals() as signals:
        signals.defer()
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.05)
        assert signals.reason is None
    signal.signal(signal.SIGUSR2, previous)


def test_a_forked_helper_ends_on_sigterm_without_a_request_to_the_run():
    with StopSignals() as signals:
        signals.defer()
        for _ in range(3):
            helper = os.fork()
            if helper == 0:
                time.sleep(60)
            os.kill(helper, signal.SIGTERM)
            assert os.WTERMSIG(os.waitpid(helper, 0)[1]) == signal.SIGTERM
        time.sleep(0.05)
        assert signals.reason is None


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def stops_at(limit: TimeLimit, clock: list[float], save_s: float) -> float:
    """Return the first second at which the run should stop."""
    clock[0] = 100.0
    while not limit.near(save_s):
        clock[0] += 1.0
    return clock[0]


def after(clock: list[float], *phases: tuple[str, float], waits_s: float = 0.0) -> TimeLimit:
    clock[0] = 100.0
    limit = TimeLimit(1000.0, began=clock[0], waits_s=waits_s)
    for step, (phase, seconds) in enumerate(phases):
        limit.enter(phase, step // 2)
        clock[0] += seconds
    limit.enter("end", 0)
    return limit


def test_time_is_reserved_for_two_saves_some_steps_and_an_evaluation(clock) -> None:
    assert stops_at(after(clock, ("step", 0.0)), clock, save_s=100.0) == 100 + 1000 - 2 * 100
    assert stops_at(after(clock, ("data", 1.0), ("step", 9.0)), clock, save_s=100.0) == 100 + 800 - 3 * 10
    assert stops_at(after(clock, ("step", 0.0), ("evaluation", 50.0)), clock, save_s=100.0) == 100 + 750
    assert stops_at(after(clock, ("step", 0.0), waits_s=50.0), clock, save_s=100.0) == 100 + 750


def test_the_longest_evaluation_is_reserved_for_ever(clock) -> None:
    """Held-out losses, samples and tasks after one step count together."""
    slow = [("evaluation", 10.0), ("evaluation", 60.0)]
    quick = [("data", 0.0), ("step", 1.0), ("evaluation", 2.0)] * 20
    limit = after(clock, *slow, *quick)
    assert limit.evaluations_s == 70.0
    assert stops_at(limit, clock, save_s=100.0) == 100 + 800 - 3 - 70
    # Known from an earlier process.
    clock[0] = 100.0
    assert stops_at(TimeLimit(1000.0, 100.0, evaluations_s=70.0), clock, save_s=100.0) == 100 + 730


def test_before_the_first_save_a_share_of_the_limit_is_reserved_ten_minutes_at_most(clock) -> None:
    assert stops_at(after(clock, ("step", 0.0)), clock, save_s=0.0) == 100 + 950
    assert not TimeLimit(100_000.0, began=clock[0] - 99_399).near(0.0)
    assert TimeLimit(100_000.0, began=clock[0] - 99_401).near(0.0)


def test_time_is_reserved_for_the_first_step_of_a_phase_with_longer_steps(clock) -> None:
    steps = [("first step", 50.0), ("data", 1.0), ("step", 9.0)]
    limit = after(clock, *steps)
    limit.expect(growth=4.0, compiles=True)
    assert stops_at(limit, clock, save_s=100.0) == 100 + 800 - 3 * (1 + 4 * 9) - 4 * 50
    # The first step with these settings and the second one are reserved. After them, the steps show how long a step takes.
    for reserved in (200, 200, 0):
        limit.expect(growth=1.0, compiles=False)
        assert stops_at(limit, clock, save_s=100.0) == 100 + 800 - 3 * (1 + 4 * 9) - reserved


def test_a_phase_with_shorter_steps_reserves_a_whole_compilation(clock) -> None:
    limit = after(clock, ("first step", 50.0), ("data", 1.0), ("step", 9.0))
    limit.expect(growth=0.25, compiles=True)
    assert stops_at(limit, clock, save_s=100.0) == 100 + 800 - 3 * 10 - 50


def test_old_steps_and_the_first_one_are_forgotten(clock) -> None:
    phases = [("first step", 500.0), ("step", 300.0), *[("step", 2.0)] * 10]
    assert stops_at(after(clock, *phases), clock, save_s=100.0) == 100 + 800 - 3 * 2
