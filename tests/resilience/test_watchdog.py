"""Only a phase beyond its timeout makes the process write its stacks and exit with 76."""

import time
from pathlib import Path

import pytest

from forge.config.schema import Resilience
from forge.resilience.watchdog import STEPS, Watchdog, bounds, collective_timeout_s, step_bound
from forge.runtime import compat
from forge.runtime.errors import WATCHDOG
from tests.support.harness import start_ranks
from tests.support.scripts import run_script
from tests.support.trained import Result

PROGRAM = """
import ctypes, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from forge.resilience import watchdog
from forge.resilience.watchdog import Watchdog

def buried_in_python():
    if how == "waiting for data":
        clock.now += 60  # late without the wait
        time.sleep(0.5)
    clock.now += 60  # now the phase has taken too long
    time.sleep(3600)

folder, how, net = sys.argv[1:]
watchdog.NET_S = float(net)
# The watchdog's clock advances only by assignment, so a busy machine makes no phase late.
clock = SimpleNamespace(now=0.0)
watchdog.time = SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep)
report = lambda alarm, step: print(f"reported at {step}: {alarm.reason}", flush=True)
if how == "words hang":
    report = lambda *_: time.sleep(3600)
watchdog.LEAST_S = 1.0
bounds = {"long": (60, "k.long"), "short": (0.3, "k.short"), "step": (1000, "k.step")}
grace = 0.5 if how == "words hang" else 240
waited = (lambda: 100.0) if how == "waiting for data" else (lambda: -1e9)
with Watchdog(bounds, Path(folder), 3, report, grace_s=grace, data_waited=waited) as dog:
    dog.enter("long", 0)
    for step in range(1, 4):
        dog.enter("short", step)
        time.sleep(0.2)
        clock.now += 0.2
    if how == "in python":
        buried_in_python()
    elif how == "holding the lock":
        dog.enter("short", 4)
        time.sleep(0.1)
        ctypes.PyDLL(None).sleep(3600)  # unlike CDLL it keeps the interpreter's lock
    elif how in ("in a step", "waiting for data", "in a phase of longer steps"):
        for step in range(4, 100):
            dog.enter("step", step)
            clock.now += 0.5
        if how == "in a phase of longer steps":
            dog.enter("first step", 100)
            clock.now += 60
            for step in range(101, 104):
                dog.enter("step", step)
                clock.now += 60
                time.sleep(0.2)
        else:
            buried_in_python()
    elif how == "words hang":
        buried_in_python()
print("out", flush=True)
"""


def run(folder: Path, how: str, net: float = 240.0) -> Result:
    """Run the program in its own process. The watchdog writes to FOLDER/run."""
    (folder / "run").mkdir()
    program, out, err = folder / "program.py", folder / "out.txt", folder / "err.txt"
    program.write_text(PROGRAM)
    words = [str(program), str(folder / "run"), how, str(net)]
    (code,) = start_ranks(run_script, 1, words, folder, {}, out, err).join()
    return Result(code, out.read_text(), err.read_text())


def test_h1_a_step_beyond_its_timeout_leaves_stacks_and_a_report_and_exits_76(tmp_path) -> None:
    ended = run(tmp_path, "in python")
    assert ended.code == WATCHDOG
    assert "reported at 3: short of step 3 has taken 60.2 s; the limit is k.short = 0.3" in ended.out
    assert "buried_in_python" in (tmp_path / "run" / "stacks-rank-3.txt").read_text()
    assert (tmp_path / "run" / "collectives-rank-3").exists()


def test_a_step_may_take_a_multiple_of_earlier_steps(tmp_path) -> None:
    ended = run(tmp_path, "in a step")
    assert ended.code == WATCHDOG
    reason = "step of step 99 has taken 60.5 s; the limit is 10 s, from the median of the last steps (at most k.step = 1000)"
    assert reason in ended.out


def test_the_limit_is_not_that_of_earlier_shorter_steps(tmp_path) -> None:
    """A phase may make a step many times longer."""
    assert run(tmp_path, "in a phase of longer steps").code == 0


def test_the_limit_of_a_step_counts_from_the_end_of_another_ranks_wait_for_data(tmp_path) -> None:
    ended = run(tmp_path, "waiting for data")
    # Step 99 begins at 48.1 s on the program's clock. 10 s after the wait, at 110 s, it is late.
    assert ended.code == WATCHDOG
    assert "step of step 99 has taken 120.5 s" in ended.out


def test_the_timeout_of_a_step_follows_the_median_within_limits() -> None:
    enough = STEPS // 4
    assert step_bound(1800.0, [30.0] * (enough - 1)) == 1800.0
    assert step_bound(1800.0, [30.0] * enough + [3000.0]) == 600.0
    assert step_bound(1800.0, [0.1] * enough) == 300.0
    assert step_bound(200.0, [0.1] * enough) == 200.0
    assert step_bound(1800.0, [500.0] * enough) == 1800.0
    assert step_bound(0.0, [1.0] * enough) == 0.0


def test_phases_within_their_timeouts_pass_and_leave_nothing(tmp_path) -> None:
    ended = run(tmp_path, "not at all")
    assert ended.code == 0 and "out" in ended.out
    assert not list((tmp_path / "run").iterdir())


def test_a_hanging_report_does_not_keep_the_process_alive(tmp_path) -> None:
    assert run(tmp_path, "words hang").code == WATCHDOG


def test_a_process_holding_the_gil_forever_ends_with_its_stacks(tmp_path) -> None:
    ended = run(tmp_path, "holding the lock", net=0.5)
    assert ended.code != 0 and "out" not in ended.out
    assert "Timeout" in ended.err and "program.py" in ended.err


def test_zero_is_no_timeout_and_collectives_wait_longer_than_any_phase(tmp_path) -> None:
    keys = {f"{phase}_timeout_s": 0.0 for phase in ("setup", "first_step", "evaluate", "save")}
    config = Resilience(step_timeout_s=0.2, **keys)
    with Watchdog(bounds(config), tmp_path, 0, pytest.fail) as watchdog:
        for phase in ("set-up", "first step", "evaluation", "save"):
            watchdog.enter(phase, 1)
            time.sleep(0.05)
        time.sleep(0.3)
        assert not watchdog.expired
    assert collective_timeout_s(config) > 1800
    assert collective_timeout_s(Resilience(save_timeout_s=9000)) > 9000


def test_with_a_gpu_the_record_is_of_nccls_collectives(monkeypatch) -> None:
    # A CUDA build has both recorders. gloo's has no record of traffic between GPUs.
    recorder = "torch._C._distributed_c10d"
    monkeypatch.setattr(f"{recorder}._dump_nccl_trace", lambda: b"nccl", raising=False)
    monkeypatch.setattr(f"{recorder}._dump_fr_trace", lambda: b"gloo")
    assert compat.flight_record() == b"gloo"
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert compat.flight_record() == b"nccl"
