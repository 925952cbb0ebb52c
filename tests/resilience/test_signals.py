import os
import signal
import subprocess
import sys
import time

import pytest

from forge.errors import STOPPED
from forge.resilience.signals import StopSignals

# The main thread waits in C, where Python can run no handler: for a lock that it holds itself.
DEADLOCK = """
import ctypes
from forge.resilience.signals import StopSignals
with StopSignals():
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_the_first_signal_is_a_request_with_a_name(name):
    with StopSignals(speak=False) as signals:
        assert signals.reason is None
        os.kill(os.getpid(), signal.Signals[name])
        assert signals.reason == name


def test_a_second_signal_changes_nothing_but_is_remarked_upon(capfd):
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.reason == "SIGTERM"
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("forge: SIGTERM: stopping") and second.startswith("forge: SIGUSR1: already")


def test_a_closed_stderr_is_no_fault_of_the_training(monkeypatch):
    def gone(descriptor, content):
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", gone)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.reason == "SIGTERM"


def test_handlers_are_given_back_and_counting_starts_anew():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    for _ in range(4):
        with StopSignals(speak=False) as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.reason == "SIGTERM"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_p4_the_third_signal_ends_even_a_process_that_hangs_in_c():
    process = subprocess.Popen(
        [sys.executable, "-c", DEADLOCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        process.send_signal(number)
        time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)  # one of a kind that is still on its way would not count
    _, errors = process.communicate(timeout=240)
    assert process.returncode == STOPPED
    assert "leaving at once" in errors


def test_other_signals_do_not_count():
    previous = signal.signal(signal.SIGUSR2, lambda *_: None)
    with StopSignals(speak=False) as signals:
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.05)
        assert signals.reason is None
    signal.signal(signal.SIGUSR2, previous)


def test_a_forked_helper_ends_on_sigterm_and_does_not_count_for_us():
    with StopSignals(speak=False) as signals:
        for _ in range(3):
            helper = os.fork()
            if helper == 0:
                time.sleep(60)
            os.kill(helper, signal.SIGTERM)
            assert os.WTERMSIG(os.waitpid(helper, 0)[1]) == signal.SIGTERM
        time.sleep(0.05)
        assert signals.reason is None
