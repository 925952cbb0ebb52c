"""Ranks hang, die or slow down: the other ranks stop waiting, and the log names the rank at fault."""

import contextlib
import ctypes
import os
import signal

import pytest

from forge.checkpoint.folders import step_name
from forge.runtime.errors import FAILED, UserError
from forge.tools.report.diagnose import diagnose
from tests.support.runs import Run, wait_for

LONG = ["--train.steps=100000", "--checkpoint.interval=0"]


@pytest.mark.parametrize("asleep", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_h1_a_hanging_rank_ends_the_run_with_the_stacks_of_all_ranks(tmp_path, asleep: int) -> None:
    run = Run(tmp_path, *LONG, "--resilience.step_timeout_s=10")
    assert run.start(world=2, fault=f"step:5:{asleep}:sleep").join() == [76, 76]
    stacks = [(run.path / "logs" / f"stacks-rank-{rank}.txt").read_text() for rank in range(2)]
    assert "fault_point" in stacks[asleep] and "fault_point" not in stacks[1 - asleep]
    assert "count_tokens" in stacks[1 - asleep]
    status = run.status()
    assert status["state"] == "failed" and status["exit_code"] == 76
    assert "step 5" in status["reason"] and "resilience.step_timeout_s = 10" in status["reason"]
    assert [event["step"] for event in run.events() if event["event"] == "watchdog"] == [5]
    assert f"[watchdog]\nRANK: {asleep}\n" in diagnose(run.path)


@pytest.mark.slow
def test_h1_the_same_command_continues_after_the_watchdog_as_if_undisturbed(tmp_path) -> None:
    whole, hung = Run(tmp_path / "whole"), Run(tmp_path / "hung")
    assert whole() == 0
    assert hung("--resilience.step_timeout_s=10", fault="step:7:0:sleep") == 76
    assert hung() == 0
    assert hung.metrics() == whole.metrics()


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("save.begin:4:1", marks=pytest.mark.slow, id="begin"),
        pytest.param("save.before_manifest:4:0", id="background"),
    ],
)
def test_h1_a_hanging_save_is_ended_too(tmp_path, point: str) -> None:
    """A hang in a background save is detected by the next save, which waits for it."""
    run = Run(tmp_path, *LONG[:1], "--resilience.save_timeout_s=4", "--resilience.step_timeout_s=30")
    assert run.start(world=2, fault=f"{point}:sleep").join() == [76, 76]
    assert "save of step" in run.status()["reason"] and "resilience.save_timeout_s" in run.status()["reason"]
    assert "step-00000004" not in run.checkpoints()


def fill_stderr() -> None:
    """Make stderr a full pipe without a reader, as if the reading program hung."""
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(size))
    os.set_blocking(writer, True)
    os.dup2(writer, 2)


FULL = "tests.faults.test_hangs:fill_stderr"


def test_h4_a_signal_stops_the_run_despite_a_full_stderr_pipe(tmp_path) -> None:
    run = Run(tmp_path, *LONG)
    ranks = run.start(world=2, patch=FULL)
    wait_for(lambda: run.stepping)
    os.kill(ranks.pids[0], signal.SIGTERM)
    assert ranks.join() == [75, 75]
    assert run.status()["state"] == "stopped" and run.checkpoints() == [step_name(run.status()["step"])]
    assert run.metrics()[-1]["step"] == run.status()["step"]


@pytest.mark.slow
@pytest.mark.planted("watchdog")
def test_h4_the_watchdog_reports_despite_a_full_stderr_pipe(tmp_path) -> None:
    run = Run(tmp_path, *LONG, "--resilience.step_timeout_s=10")
    assert run.start(fault="step:5:0:sleep", patch=FULL).join() == [76]
    assert (run.status()["state"], run.status()["exit_code"]) == ("failed", 76)
    assert "resilience.step_timeout_s = 10" in run.status()["reason"]
    assert (run.path / "logs" / "stacks-rank-0.txt").exists()


@pytest.mark.parametrize("dead", [0, 1])
def test_k1_survivors_of_a_killed_rank_end_soon_and_the_log_names_rank_and_step(tmp_path, dead: int) -> None:
    run = Run(tmp_path, *LONG, "--train.global_batch_size=6")
    patch = "tests.faults.test_hangs:wait_for_all_but_one"
    codes = run.start(world=3, fault=f"step:7:{dead}", patch=patch).join()
    assert codes[dead] == -signal.SIGKILL
    assert all(code not in (0, -signal.SIGKILL) for rank, code in enumerate(codes) if rank != dead)
    log = run.log(1 - dead)
    assert f"rank {1 - dead} failed in step of step 7" in log
    # Rank 0 holds the rendezvous store. Under torchrun the agent holds it, and would survive.
    assert f"no answer from rank {dead}" in log or (dead == 0 and "is gone" in log)
    if dead:
        assert f"no answer from rank {dead}" in run.status()["reason"]
    # Rank 0 writes the reports, but none of its own death.
    assert ("[killed]\nRANK: 1\n" if dead else "[killed]\nRANK: 0, which the other ranks") in diagnose(
        run.path
    )


def wait_for_all_but_one() -> None:
    """Wait until all ranks but one have answered, however slow the machine is."""
    from forge.run.crash import RollCall

    missing = RollCall.missing

    def one_missing(self, patience_s: float, quiet_s: float) -> list[int]:
        while len(found := missing(self, quiet_s)) > 1:
            pass
        return found

    RollCall.missing = one_missing


@pytest.mark.parametrize("at_fault", [0, 1])
@pytest.mark.planted("disk_full")
def test_an_error_of_one_rank_is_the_reason_and_waiting_ranks_are_not_called_dead(
    tmp_path, at_fault: int
) -> None:
    run = Run(tmp_path, *LONG)
    assert run.start(world=2, fault=f"step:7:{at_fault}:raise").join() == [1, 1]
    reason = run.status()["reason"]
    assert f"the first to fail was rank {at_fault}: step of step 7: OSError" in reason
    assert "killed or hung" not in reason


@pytest.mark.parametrize("at_fault", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["an error", "a refusal"])
def test_h3_a_raising_rank_ends_ranks_whose_wait_never_fails(tmp_path, at_fault: int, fault: str) -> None:
    """NCCL ranks on one node wait like this. All phase timeouts are half an hour or more."""
    run = Run(tmp_path, *LONG)
    names = {"an error": "raise_in_step_4", "a refusal": "refuse_in_step_4"}
    patch = f"tests.faults.test_hangs:{names[fault]}_on_rank_{at_fault}"
    assert run.start(world=2, patch=patch).join() == [1, 1]
    status, other = run.status(), 1 - at_fault
    assert status["state"] == "failed" and status["exit_code"] == 1
    if fault == "an error":
        assert (
            f"the first to fail was rank {at_fault}: step of step 4: ValueError: planted" in status["reason"]
        )
    else:
        assert status["reason"] == "planted"
    assert "wait_for_ever" in (run.path / "logs" / f"stacks-rank-{other}.txt").read_text()
    # Rank 0 holds the rendezvous store, and does not wait for other ranks when it refuses.
    assert "planted" in run.log(other) or (fault == "a refusal" and other == 1 and "is gone" in run.log(1))
    assert not run.events("watchdog")
    if fault == "an error":
        assert f"WHAT HAPPENED FIRST: an error in the program [error]\nRANK: {at_fault}\n" in diagnose(
            run.path
        )


def raise_in_step_4_on_rank_0() -> None:
    _plant(ValueError("planted"), 0)


def raise_in_step_4_on_rank_1() -> None:
    _plant(ValueError("planted"), 1)


def refuse_in_step_4_on_rank_0() -> None:
    _plant(UserError("planted", FAILED), 0)


def refuse_in_step_4_on_rank_1() -> None:
    _plant(UserError("planted", FAILED), 1)


def _plant(error: Exception, at_fault: int) -> None:
    """Raise on one rank before its first send of step 4, and let the other rank wait forever, in C."""
    from forge.train.trainer import Trainer

    compute = Trainer.compute_gradients

    def plant(self, batch):
        if self.progress.step == 3:
            if os.environ["RANK"] == str(at_fault):
                raise error
            wait_for_ever()
        return compute(self, batch)

    Trainer.compute_gradients = plant


def wait_for_ever() -> None:
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
