"""SIGKILL at chosen and at random moments: a rerun of the same command gives the history of an undisturbed run."""

from __future__ import annotations

import json
import random
import signal
import time
from statistics import mean

import pytest

from forge.checkpoint.folders import step_name
from tests.support.fault_layouts import TWO_RANKS
from tests.support.harness import Started
from tests.support.runs import Run, assert_same_history, wait_for

KILLED = -signal.SIGKILL


def test_k1_one_rank_killed_in_mid_step_then_the_same_command(tmp_path, undisturbed) -> None:
    run = Run(tmp_path)
    codes = run.start(world=2, fault="step:7:1").join()
    assert codes[1] == KILLED and codes[0] not in (0, KILLED)
    assert "step of step 7" in run.log(0) and "no answer from rank 1" in run.log(0)
    assert run(world=2) == 0
    assert_same_history(run, undisturbed(world=2))


def test_k2_all_ranks_killed_in_mid_step_then_the_same_command(tmp_path, undisturbed) -> None:
    run = Run(tmp_path)
    assert run(world=2, fault="step:7:*") == KILLED
    assert run.status()["state"] == "running"
    assert run(world=2) == 0
    # The kill may have interrupted the save of step 6.
    assert run.events("resumed")[0]["step"] in (4, 6)
    assert_same_history(run, undisturbed(world=2))


# (fault point in the save of step 6, step from which the next start resumes)
BOUNDARIES = {
    "save.begin": 4,
    "save.between_shards": 4,
    "save.before_manifest": 4,
    "save.before_rename": 4,
    "save.before_prune": 6,
    "save.during_prune": 6,
}
PRUNING = "--checkpoint.keep_last=2"


@pytest.mark.parametrize("point", BOUNDARIES)
def test_k3_a_kill_at_a_boundary_of_a_save(tmp_path, undisturbed, point: str) -> None:
    run = Run(tmp_path, PRUNING)
    assert run(fault=f"{point}:6:0") == KILLED
    assert run() == 0
    assert run.events("resumed")[0]["step"] == BOUNDARIES[point]
    assert_same_history(run, undisturbed(PRUNING))
    assert run.checkpoints() == [step_name(8), step_name(10)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "mode"),
    [(0, "async"), (1, "async"), (0, "sync"), (1, "sync")],
)
def test_k3_one_rank_killed_between_the_shards(tmp_path, undisturbed, rank: int, mode: str) -> None:
    run = Run(tmp_path, PRUNING, f"--checkpoint.mode={mode}")
    codes = run.start(world=2, fault=f"save.between_shards:6:{rank}").join()
    assert codes[rank] == KILLED and codes[1 - rank] not in (0, KILLED)
    assert run(world=2) == 0
    assert_same_history(run, undisturbed(PRUNING, world=2))


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_k3_a_rank_killed_in_the_last_save_is_named(tmp_path, undisturbed, mode: str) -> None:
    """No later step follows, whose collectives would reveal the missing rank."""
    run = Run(tmp_path, f"--checkpoint.mode={mode}")
    codes = run.start(world=2, fault="save.between_shards:10:1").join()
    assert codes == [1, KILLED]
    reason = run.status()["reason"]
    assert "save of step 10" in reason and "no answer from rank 1" in reason
    assert run(world=2) == 0
    assert_same_history(run, undisturbed(world=2))


def test_k4_a_stale_partial_folder_of_the_step_about_to_be_saved(tmp_path, undisturbed) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=4") == 0
    for name in (f".partial-{step_name(6)}", f".pruned-{step_name(2)}"):
        (run.path / "checkpoints" / name).mkdir()
        (run.path / "checkpoints" / name / "__0_0.distcp").write_bytes(b"rubbish")
    assert run() == 0
    assert_same_history(run, undisturbed())


# Long enough to be hit; a save is running about half of the time.
MANY_STEPS = ("--train.steps=30", "--checkpoint.interval=3")


def _trials() -> list:
    """Return (layout, seed) of thirty trials."""
    return [(list(TWO_RANKS)[seed % len(TWO_RANKS)], seed) for seed in range(30)]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "seed"), _trials())
def test_k2_kills_at_random_moments(tmp_path, undisturbed, layout: str, seed: int) -> None:
    """Kill one rank or both, twice in a run with background saves."""
    options = (*TWO_RANKS[layout], *MANY_STEPS)
    whole = undisturbed(*options, world=2)
    seconds = mean(line["step_time_s"] for line in whole.metrics(times=True))
    run, drawn = Run(tmp_path, *options), random.Random(seed)
    for _ in range(2):
        begun, ranks = _begun(run), run.start(world=2)
        _wait_for_training(run, ranks, begun)
        # By step, not by time, because a kill after the end would test nothing.
        step, of_a_step = drawn.randrange(25), drawn.uniform(0, seconds)
        _wait_for_step(run, ranks, step)
        time.sleep(of_a_step)
        for rank in drawn.choice([[0], [1], [0, 1]]):
            ranks.processes[rank].kill()  # a no-op if it has ended
        ranks.join()
    begun = _begun(run)
    assert run(world=2) == 0
    assert_same_history(run, whole, swept=_begun(run) > begun)


def _step(run: Run) -> int:
    """Return the last step with a complete line of metrics."""
    path = run.path / "metrics.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def _wait_for_step(run: Run, ranks: Started, step: int) -> None:
    wait_for(lambda: _step(run) >= step or not ranks.processes[0].is_alive())


def _begun(run: Run) -> int:
    """Return how many starts of the run have begun to train."""
    return len(run.events("fresh")) + len(run.events("resumed"))


def _wait_for_training(run: Run, ranks: Started, begun: int) -> None:
    """Wait until the run trains, or has ended because the kill of the previous start came too late."""
    wait_for(lambda: _begun(run) > begun or not ranks.processes[0].is_alive())
