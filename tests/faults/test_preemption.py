"""Stop signals at any moment: all ranks stop at the same step, after one complete checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from forge.checkpoint.folders import step_name
from tests.support.runs import Run, assert_same_history, wait_for

ENDLESS = ["--train.steps=100000", "--checkpoint.interval=0"]


def assert_stopped_in_good_order(run: Run) -> None:
    status = run.status()
    assert status["state"] == "stopped" and status["exit_code"] == 75
    assert run.checkpoints()[-1] == step_name(status["step"])
    assert all(name.startswith("step-") for name in run.checkpoints())
    assert run.metrics()[-1]["step"] == status["step"]


@pytest.mark.parametrize(
    ("rank", "name"),
    [pytest.param(0, "SIGTERM", marks=pytest.mark.slow), (1, "SIGINT"), (1, "SIGUSR1"), (0, "SIGHUP")],
)
def test_p2_a_signal_to_one_rank_stops_all_at_one_step(tmp_path, undisturbed, rank: int, name: str) -> None:
    run = Run(tmp_path)
    assert run(world=2, fault=f"step:5:{rank}:signal={name}") == 75
    assert_stopped_in_good_order(run)
    assert run.status()["step"] in (5, 6)
    assert run(world=2) == 0
    assert_same_history(run, undisturbed(world=2))


def test_p2_a_signal_from_outside_to_one_rank(tmp_path) -> None:
    run = Run(tmp_path, *ENDLESS)
    ranks = run.start(world=2)
    wait_for(lambda: run.stepping)
    os.kill(ranks.pids[1], signal.SIGTERM)
    assert ranks.join() == [75, 75]
    assert_stopped_in_good_order(run)
    assert len(run.checkpoints()) == 1


EVALUATED = ['--data.validation=[{name="held",path="synthetic"}]', "--evaluate.interval=4"]
MOMENTS = [
    pytest.param("set-up:0:0", marks=pytest.mark.slow),
    pytest.param("set-up:0:1", marks=pytest.mark.slow),
    "step:1:0",
    pytest.param("evaluation:4:1", marks=pytest.mark.slow),
    pytest.param("save.begin:4:0", marks=pytest.mark.slow),
    "save.between_shards:4:1",
    pytest.param("save.before_rename:4:0", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_p3_a_signal_at_any_time_stops_cleanly(tmp_path, undisturbed, moment: str) -> None:
    run = Run(tmp_path, *EVALUATED)
    assert run(world=2, fault=f"{moment}:signal") == 75
    assert_stopped_in_good_order(run)
    # The signal comes from a background save. At the latest the next save, two steps later, waits for it.
    assert run.status()["step"] <= int(moment.split(":")[1]) + 4
    assert run(world=2) == 0
    assert_same_history(run, undisturbed(*EVALUATED, world=2))


def test_p4_a_signal_after_the_save_leaves_the_status_stopped(tmp_path) -> None:
    run = Run(tmp_path)
    patch = "tests.faults.test_preemption:signal_before_the_last_status"
    assert run.start(world=2, patch=patch, fault="step:5:0:signal").join() == [75, 75]
    assert_stopped_in_good_order(run)


@pytest.mark.planted("disk_full")
def test_k1_a_signal_does_not_cut_the_crash_report_short(tmp_path) -> None:
    """torchrun sends this signal to the other ranks when one has died."""
    run = Run(tmp_path)
    patch = "tests.faults.test_preemption:signal_before_the_last_status"
    assert run.start(world=2, patch=patch, fault="step:5:1:raise").join() == [1, 1]
    assert run.status()["state"] == "failed" and "rank 1: step of step 5" in run.status()["reason"]


def signal_before_the_last_status() -> None:
    from forge.observe.report import Reporter

    ended = Reporter.ended

    def late(self, *arguments, **keywords) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        ended(self, *arguments, **keywords)

    Reporter.ended = late


def test_p3_a_signal_between_two_microbatches(tmp_path, undisturbed) -> None:
    run = Run(tmp_path)
    patch = "tests.faults.test_preemption:signal_in_the_second_microbatch"
    assert run.start(world=2, patch=patch).join() == [75, 75]
    assert_stopped_in_good_order(run)
    assert run(world=2) == 0
    assert_same_history(run, undisturbed(world=2))


def signal_in_the_second_microbatch() -> None:
    """Send a signal on rank 1 in the second and last microbatch of step 3."""
    from forge.model import Transformer

    forward, calls = Transformer.forward, [0]

    def counting(self, *arguments, **named):
        calls[0] += 1
        if calls[0] == 6 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, *arguments, **named)

    Transformer.forward = counting


@pytest.mark.slow
def test_p3_a_signal_while_the_first_step_is_being_compiled(tmp_path) -> None:
    """Inductor's first files show a compilation in progress."""
    options = ["--compile.enabled=true", "--train.steps=4"]
    run, whole = Run(tmp_path / "run", *options), Run(tmp_path / "whole", *options)
    patch = "tests.faults.test_preemption:compile_from_nothing"
    ranks = run.start(world=2, patch=patch)
    wait_for(lambda: any((run.path / "inductor").rglob("*.cpp")), seconds=200)
    os.kill(ranks.pids[1], signal.SIGTERM)
    assert not (run.path / "metrics.jsonl").exists()
    assert ranks.join(250) == [75, 75]
    assert_stopped_in_good_order(run)
    assert run.start(world=2, patch=patch).join(250) == [0, 0]
    assert whole.start(world=2, patch=patch).join(250) == [0, 0]
    assert_same_history(run, whole)


def compile_from_nothing() -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["RUN_UNDER_TEST"] + "/inductor"


@pytest.mark.parametrize("signals", [2, pytest.param(3, marks=pytest.mark.planted("killed"))])
def test_p4_a_second_request_does_not_disturb_the_save_and_a_third_exits_at_once(
    tmp_path, undisturbed, signals: int
) -> None:
    """Each request is a burst of signals, as from Slurm and torchrun."""
    run = Run(tmp_path)
    ranks = run.start(world=2, patch="tests.faults.test_preemption:hold_the_save_of_step_6")
    partial = run.path / "checkpoints" / f".partial-{step_name(6)}" / "manifest.json"
    wait_for(partial.exists)
    for _ in range(2):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            for pid in ranks.pids:
                os.kill(pid, number)
        time.sleep(1.0)
    wait_for(lambda: "already stopping" in run.output())
    wait_for(lambda: all((run.path / f"waits-{rank}").exists() for rank in (0, 1)))
    if signals == 2:
        (run.path / "go").touch()
        assert ranks.join() == [75, 75]
        assert_stopped_in_good_order(run)
    else:
        os.kill(ranks.pids[1], signal.SIGUSR1)
        ranks.processes[1].join(
            240
        )  # first: while held, rank 0 continues without this rank, but not the reverse
        os.kill(ranks.pids[0], signal.SIGUSR1)
        assert ranks.join() == [75, 75]
        assert "leaving at once" in run.output()
        assert run.status()["state"] == "running" and partial.exists()
    assert run(world=2) == 0
    assert_same_history(run, undisturbed(world=2))


def hold_the_save_of_step_6() -> None:
    """Hold rank 0's save until a file `go` exists. A rank waiting for rank 0 creates a file `waits`."""
    import forge.checkpoint.commit as commit
    import forge.resilience.stopping as stopping
    import forge.run.save as save

    stopping.SAME_REQUEST_S = 0.5

    path = Path(os.environ["RUN_UNDER_TEST"])
    wait = save.Saves._wait

    def hold(name: str, step: int) -> None:
        if (name, step) == ("save.before_rename", 6):
            wait_for((path / "go").exists)

    def mark_and_wait(self) -> None:
        if self._trainer.progress.step > 6:
            (path / f"waits-{os.environ['RANK']}").touch()
        wait(self)

    commit.fault_point, save.Saves._wait = hold, mark_and_wait
