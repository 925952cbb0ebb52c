"""A history's origin counts once: the same command, started again, continues. Two histories never mix."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge.checkpoint.folders import step_name
from tests.support import spoil
from tests.support.runs import Run, assert_same_history, flip_a_bit, refused, tensor_files

SLOW = "--optimizer.lr=0.0001"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Run:
    """Return a finished run of six steps with a checkpoint every two steps."""
    run = Run(tmp_path_factory.mktemp("source"))
    assert run("--train.steps=6", "--checkpoint.keep_last=0") == 0
    return run


def checkpoint(run: Run, step: int) -> str:
    return str(run.path / "checkpoints" / step_name(step))


def visible(run: Run) -> list[str]:
    return [name for name in run.checkpoints() if not name.startswith(".")]


def test_r6_another_runs_checkpoint_replaces_the_old_history(tmp_path, source: Run) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=4", SLOW) == 0
    old = (run.path / "metrics.jsonl").read_text()
    assert run(f"--checkpoint.resume={checkpoint(source, 4)}", "--train.steps=6") == 0
    assert run.metrics() == source.metrics()[4:]
    assert run.checkpoints() == [".aside-step-00000002", ".aside-step-00000004", "step-00000006"]
    assert tensor_files(run, 6) == tensor_files(source, 6)
    # Nothing is lost. The log and the events name the new place.
    assert (run.path / ".aside-metrics.jsonl").read_text() == old
    [event] = run.events("set_aside")
    assert event["metrics"] == ".aside-metrics.jsonl" and len(event["checkpoints"]) == 2
    assert ".aside-metrics.jsonl" in run.log() and "belongs to another history: renamed to" in run.log()


def test_a_checkpoint_set_aside_is_another_history(tmp_path) -> None:
    """Even inside the run's own folder."""
    run = Run(tmp_path)
    assert run("--train.steps=6", SLOW) == 0
    assert run("--train.steps=4", "--checkpoint.resume=none") == 0
    aside = run.path / "checkpoints" / ".aside-step-00000006"
    assert run(f"--checkpoint.resume={aside}", "--train.steps=8", SLOW) == 0
    assert visible(run) == ["step-00000008"]
    assert [line["step"] for line in run.metrics()] == [7, 8]


@pytest.mark.parametrize("origin", [pytest.param("path", marks=pytest.mark.slow), "none", "init"])
def test_r6_the_same_command_resumes_its_own_saves(tmp_path, source: Run, origin: str) -> None:
    """torchrun and Slurm repeat the command after a stop and after a kill. Each origin counts once."""
    option = {
        "path": f"--checkpoint.resume={checkpoint(source, 2)}",
        "none": "--checkpoint.resume=none",
        "init": f"--checkpoint.init={checkpoint(source, 6)}",
    }[origin]
    options = (option, "--checkpoint.mode=sync")
    whole, run = Run(tmp_path / "whole", *options), Run(tmp_path / "run", *options)
    assert whole() == 0
    assert run(fault="step:4:*:signal") == 75
    assert run(fault="step:8:*:kill") == -9
    assert run() == 0
    assert_same_history(run, whole)
    assert [event["step"] for event in run.events("resumed")] == [2, 4, 6][0 if origin == "path" else 1 :]
    assert not [name for name in run.checkpoints() if name.startswith(".aside")]
    assert f"{option.removeprefix('--').replace('=', ' = ')} is ignored" in run.log()


def test_an_own_checkpoint_as_origin_sets_aside_later_ones_and_counts_once(tmp_path) -> None:
    run = Run(tmp_path, "--checkpoint.keep_last=2", "--checkpoint.mode=sync")
    assert run("--train.steps=6") == 0
    back = f"--checkpoint.resume={checkpoint(run, 4)}"
    assert run(back, SLOW, fault="step:10:*:kill") == -9
    assert visible(run) == [step_name(6), step_name(8)]  # the origin itself has been removed
    assert run(back, SLOW) == 0
    resumed = [(event["step"], event["replaced_after"]) for event in run.events("resumed")]
    assert resumed == [(4, 4), (8, None)]
    assert [line["step"] for line in run.metrics()] == list(range(1, 11))
    aside = [json.loads(line) for line in (run.path / ".aside-metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in aside] == list(range(1, 7))


def test_r6_resume_none_begins_again_after_the_end_or_with_other_settings(tmp_path) -> None:
    run = Run(tmp_path, "--checkpoint.resume=none", "--train.steps=6")
    assert run(fault="step:4:*:signal") == 75
    assert run("--parallel.dp_replicate=2", "--parallel.dp_shard=1", world=2) == 0  # the layout may change
    assert [event["step"] for event in run.events("resumed")] == [4]
    assert run(fault="step:4:*:signal") == 75 and "is finished" in run.log()
    assert run(SLOW) == 0 and "other settings in optimizer.lr" in run.log()
    assert len(run.events("fresh")) == 3 and len(run.events("resumed")) == 1
    assert run.metrics()[-1]["lr"] == 0.0001
    asides = [name for name in run.checkpoints() if name.startswith(".aside")]
    assert len(asides) == 5 and visible(run) == [step_name(2), step_name(4), step_name(6)]


@pytest.mark.parametrize("variable", ["SLURM_RESTART_COUNT", "FORGE_ROUND"])
def test_a_launchers_restart_does_not_begin_a_finished_run_again(tmp_path, variable: str) -> None:
    """E.g. when another rank fails after rank 0 has reported the end, or when a node joins an elastic run at its end."""
    run = Run(tmp_path, "--checkpoint.resume=none", "--train.steps=2")
    assert run() == 0
    # The restarted rank may not be the first rank.
    patch = f"tests.end_to_end.test_origins:last_rank_has_{variable.lower()}"
    assert run.start("--parallel.dp_replicate=2", patch=patch, world=2).join() == [0, 0]
    assert len(run.events("fresh")) == 1 and run.status()["state"] == "finished"
    assert [event["restarted"] for event in run.events("started")] == [False, True]


def test_another_runs_last_checkpoint_leaves_nothing_to_train(tmp_path, source: Run) -> None:
    run = Run(tmp_path)
    assert run("--train.steps=4", SLOW) == 0
    before = run.status(), run.checkpoints(), run.metrics()
    output = refused(run, f"--checkpoint.resume={checkpoint(source, 6)}", "--train.steps=6")
    assert (
        "nothing is left to train, because the checkpoint is already at step 6 of 6; raise train.steps"
        in output
    )
    assert (run.status()["step"], run.checkpoints(), run.metrics()) == (before[0]["step"], *before[1:])


def test_a_refused_start_sets_no_history_aside(tmp_path) -> None:
    """A hook refuses the run after the model has been built."""
    run = Run(tmp_path)
    assert run("--train.steps=4") == 0
    before = run.checkpoints(), run.metrics()
    again = ["--checkpoint.resume=none", "--train.steps=6"]
    output = refused(run, *again, '--train.hooks=["tests.support.node_hooks:Refusing"]')
    assert "not today" in output
    assert (run.checkpoints(), run.metrics()) == before and not run.events("set_aside")
    last = '--train.hooks=["tests.support.node_hooks:RefusingOnTheLastRank"]'
    refused(run, *again, last, "--parallel.dp_replicate=2", world=2)
    assert (run.checkpoints(), run.metrics()) == before and not run.events("set_aside")
    assert run("--train.steps=4") == 0 and "is finished" in run.log()


def test_weights_of_a_different_model_are_refused_before_anything_is_built(tmp_path, source: Run) -> None:
    output = refused(Run(tmp_path), f"--checkpoint.init={checkpoint(source, 6)}", "--model.norm_eps=0.1")
    assert (
        "model.norm_eps: 1e-05 in the checkpoint, 0.1 now" in output and "checkpoint.init_changes" in output
    )


def last_rank_has_slurm_restart_count() -> None:
    if os.environ["RANK"] == "1":
        os.environ["SLURM_RESTART_COUNT"] = "1"


def last_rank_has_forge_round() -> None:
    if os.environ["RANK"] == "1":
        os.environ["FORGE_ROUND"] = "1"


def test_r6_a_rollback_without_an_own_checkpoint_returns_to_the_origin(tmp_path, source: Run) -> None:
    options = ["--resilience.max_skipped_steps=3", "--checkpoint.interval=0"]
    run = Run(tmp_path, f"--checkpoint.resume={checkpoint(source, 4)}", *options)
    patch = "tests.support.spoil:samples_32_to_55"
    assert run.start(patch="tests.faults.test_numerics:die_when_step_5_comes_again").join() == [-9]
    assert run.start(patch=patch).join() == [0]
    [event] = run.events("rolled_back")
    assert (event["from_step"], event["to_step"]) == (7, 4)
    assert [line["step"] for line in run.metrics()] == list(range(5, 11))
    assert not any(line.get("skipped") for line in run.metrics())
    assert "lacks the training lines" not in run.log()


def damage_step_4_and_die_after_the_roll_back() -> None:
    import forge.run.hooks as hooks

    spoil.samples_32_to_55()
    seen: list[int] = []

    def on_step(name: str, step: int) -> None:
        seen.append(step)
        if step == 6:
            flip_a_bit(SimpleNamespace(path=Path(os.environ["RUN_UNDER_TEST"])), 4)
        if seen.count(3) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    hooks.fault_point = on_step


def test_r6_a_damaged_checkpoint_does_not_end_a_run_that_has_returned_to_the_origin(tmp_path, source) -> None:
    options = ["--resilience.max_skipped_steps=3", "--checkpoint.interval=4", "--checkpoint.mode=sync"]
    run = Run(tmp_path, f"--checkpoint.resume={checkpoint(source, 2)}", *options)
    patch = "tests.end_to_end.test_origins:damage_step_4_and_die_after_the_roll_back"
    assert run.start(patch=patch).join() == [-9]
    assert run.checkpoints() == [".aside-step-00000004"]
    assert run.start(patch="tests.support.spoil:samples_32_to_55").join() == [0]
    assert [event["step"] for event in run.events("resumed")] == [2, 2]
    assert [line["step"] for line in run.metrics()] == list(range(3, 11))


def test_roll_backs_before_the_origin_do_not_count_as_failed(tmp_path) -> None:
    options = ["--resilience.max_skipped_steps=3", "--resilience.max_rollbacks=1"]
    first = Run(tmp_path / "first", *options)
    assert first.start(patch="tests.support.spoil:samples_32_to_55").join() == [0]
    more = ["--train.steps=20", "--checkpoint.interval=0", f"--checkpoint.resume={checkpoint(first, 10)}"]
    second = Run(tmp_path / "second", *options, *more)
    assert second.start(patch="tests.support.spoil:everything_from_32").join() == [1]
    assert [(event["from_step"], event["to_step"]) for event in second.events("rolled_back")] == [(13, 10)]
    assert "1 roll-backs have not helped" in second.status()["reason"]
