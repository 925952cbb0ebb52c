"""Time limits, the time ledger and stragglers."""

from __future__ import annotations

import signal
import time
from datetime import datetime
from typing import Any

import pytest

from tests.support.runs import Run


@pytest.mark.parametrize("world", [1, 2])
def test_p5_a_run_saves_and_stops_before_its_time_limit(tmp_path, world: int) -> None:
    """Without a measured save, forge reserves a twentieth of the limit for it, and three steps for the stop."""
    run = Run(tmp_path, "--train.steps=100000", "--checkpoint.interval=0", "--resilience.time_limit_s=5")
    codes = run.start(world=world, patch="tests.support.spoil:half_a_second_for_each_step").join()
    assert codes == [75] * world
    status = run.status()
    assert 3.25 <= 0.5 * status["step"] <= 4.75
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert "final" not in status  # job scripts start the run again
    assert "resilience.time_limit_s" in status["reason"]
    assert run.checkpoints()[-1] == f"step-{status['step']:08d}"
    assert run.metrics()[-1]["step"] == status["step"]


def test_p5_the_run_continues_after_a_stop_by_the_limit(tmp_path) -> None:
    """If the limit passes before the first step, each start still makes a little progress."""
    whole, limited = Run(tmp_path / "whole"), Run(tmp_path / "limited")
    assert whole() == 0
    starts = 0
    while (code := limited("--resilience.time_limit_s=0.01")) == 75:
        starts += 1
    assert code == 0 and starts >= 3
    assert limited.metrics() == whole.metrics()


def test_the_ledger_sums_to_wall_time_over_a_kill_and_knows_repeated_steps(tmp_path) -> None:
    held_out = ['--data.validation=[{name="held",path="synthetic"}]', "--evaluate.interval=4"]
    run = Run(tmp_path, *held_out, "--checkpoint.interval=5", "--train.steps=14")
    before = time.time()
    assert run(fault="step:10:0") == -signal.SIGKILL
    last_sign = _when(run.status())
    time.sleep(1.5)
    assert run() == 0
    ledger = run.events("goodput")[-1]
    seconds = ledger["seconds"]
    first, second = map(_when, run.events("started"))
    # The first process began between its start and its first event; the run was down until the second process began.
    total, accuracy = sum(seconds.values()), 0.05
    assert _when(ledger) - first - accuracy <= total <= _when(ledger) - before + accuracy
    assert 1.5 <= seconds["down"] <= second - last_sign + accuracy
    # Resumed from 5, the second process trains step 6 first, then repeats 7 and 8, which the first process had reported.
    assert seconds["repeated steps"] > 0 and seconds["steps"] > 0 and seconds["save"] > 0
    assert seconds["evaluation"] > 0 and seconds["set-up"] > 0 and seconds["first step"] > 0
    assert "went into useful steps" in run.log()


def _when(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def test_h2_only_the_slow_rank_is_named_with_its_slow_phase(tmp_path) -> None:
    options = ["--train.steps=12", "--resilience.straggler_interval=5", "--checkpoint.interval=0"]
    for phase in ("data", "forward", "optimizer"):
        run = Run(tmp_path / phase, *options)
        assert run.start(world=2, patch=f"tests.support.spoil:slow_{phase}_on_rank_1").join() == [0, 0]
        named = [(event["step"], event["rank"], event["phase"]) for event in run.events("straggler")]
        assert named == [(5, 1, phase), (10, 1, phase)]
        assert f"rank 1 is slow at step 5: its {phase} takes 0.05 s, the median rank's 0.01 s" in run.log()
