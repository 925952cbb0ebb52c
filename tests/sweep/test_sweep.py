"""Trials of a sweep, and sweeps that are killed anywhere: the table is that of an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.errors import UserError
from forge.sweep.local import run_sweep
from forge.sweep.results import Result, as_text, metric_of, result_of, rows
from forge.sweep.slurm import job_array, pending
from forge.sweep.spec import Sweep, Trial, first_trials, next_trials, read_sweep

FAKE = Path(__file__).with_name("fake_train.py")
KEYS = {"optimizer.lr": [0.001, 0.003, 0.01], "optimizer.weight_decay": [0.0, 0.1]}
RANDOM = {"optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True}, "train.seq_len": [64, 128]}
TEN = {"train.steps": 10}


def sweep_of(folder: Path, **keys: Any) -> Sweep:
    tree = {"config": "debug", "output_dir": str(folder), "seeds": [0, 1], "keys": KEYS}
    return Sweep.model_validate(tree | keys)


def table(sweep: Sweep) -> Any:
    return json.loads((sweep.folder / "table.json").read_text())


def test_a_grid_has_every_combination_and_a_search_the_same_draws_each_time(tmp_path) -> None:
    grid = first_trials(sweep_of(tmp_path))
    assert [trial.values for trial in grid][:3] == [
        {"optimizer.lr": 0.001, "optimizer.weight_decay": 0.0},
        {"optimizer.lr": 0.001, "optimizer.weight_decay": 0.1},
        {"optimizer.lr": 0.003, "optimizer.weight_decay": 0.0},
    ]
    search = sweep_of(tmp_path, method="random", trials=40, keys=RANDOM)
    drawn = first_trials(search)
    assert drawn == first_trials(search)
    assert drawn != first_trials(search.model_copy(update={"draw": 1}))
    rates = sorted(trial.values["optimizer.lr"] for trial in drawn)
    assert 1e-4 <= rates[0] < 1e-3 and 1e-2 < rates[-1] <= 1e-1


def test_the_budget_of_tokens_leaves_the_last_trials_out(tmp_path) -> None:
    one = 300 * 16 * 256 * 2  # of debug, for both seeds
    assert len(first_trials(sweep_of(tmp_path, budget_tokens=4 * one))) == 4
    with pytest.raises(UserError, match="less than one trial"):
        first_trials(sweep_of(tmp_path, budget_tokens=one - 1))


def test_halving_gives_the_best_longer_runs(tmp_path) -> None:
    sweep = sweep_of(tmp_path, method="halving", trials=9, rungs=3, eta=3, keys=RANDOM)
    first = first_trials(sweep)
    assert {trial.steps for trial in first} == {300 // 9}
    second = next_trials(sweep, first, {trial.number: float(-trial.number) for trial in first})
    assert [trial.number for trial in second] == [6, 7, 8] and {trial.steps for trial in second} == {99}
    third = next_trials(sweep, second, {7: 1.0, 6: 2.0})
    assert [(trial.number, trial.steps, trial.rung) for trial in third] == [(7, 300, 2)]
    assert next_trials(sweep, third, {7: 0.0}) == []


def test_the_metric_is_of_the_last_tenth_or_the_last_evaluation() -> None:
    lines: list[dict[str, Any]] = [{"step": step, "loss": float(step)} for step in range(1, 31)]
    assert metric_of(lines, "loss") == 29.0
    assert metric_of([*lines, {"step": 30, "loss": None}], "loss") is None
    lines += [{"step": 20, "eval": {"a": 2.0}}, {"step": 30, "eval": {"a": 1.5}}]
    assert metric_of(lines, "eval.a") == 1.5
    assert metric_of(lines, "eval.b") is None


@pytest.mark.parametrize(
    ("method", "kills"), [("grid", [1, 31]), pytest.param("halving", [23, 40], marks=pytest.mark.slow)]
)
def test_a_killed_sweep_ends_with_the_table_of_an_undisturbed_one(
    tmp_path, method: str, kills: list[int]
) -> None:
    keys: dict[str, Any] = {"method": method, "trials": 4, "eta": 2, "overrides": TEN}
    keys["keys"] = {"optimizer.lr": [0.001, 0.003, 0.01]}
    whole, killed = sweep_of(tmp_path / "whole", **keys), sweep_of(tmp_path / "killed", **keys)
    run_sweep(whole, lambda results: None, [sys.executable, str(FAKE)])
    counter = tmp_path / "counter"
    code = (
        "import sys; from forge.sweep.local import run_sweep; from forge.sweep.spec import Sweep\n"
        "sweep = Sweep.model_validate_json(sys.argv[1])\n"
        "run_sweep(sweep, lambda results: None, [sys.executable, sys.argv[2]])"
    )
    for lines in [*kills, 0]:
        counter.unlink(missing_ok=True)
        if lines:
            counter.write_text(str(lines))
        command = [sys.executable, "-c", code, killed.model_dump_json(), str(FAKE)]
        ended = subprocess.run(command, env=os.environ | {"KILL_AT": str(counter)}, check=False)
        assert ended.returncode == (-signal.SIGKILL if lines else 0)
    assert table(killed) == table(whole)
    assert all(row["state"] == "finished" for row in table(whole))


@pytest.mark.processes
def test_a_failed_run_has_no_result_and_the_others_do(tmp_path) -> None:
    sweep = sweep_of(tmp_path, keys={"optimizer.lr": [0.9, 0.003]}, seeds=[0], overrides=TEN, workers=2)
    results = run_sweep(sweep, lambda results: None, [sys.executable, str(FAKE)])
    assert [result.done for result in results] == [False, True]
    found = table(sweep)
    assert [(row["trial"], row["state"], row["tokens"]) for row in found] == [
        (1, "finished", 1000),
        (0, "failed", 1000),
    ]
    assert "failed" in as_text(found)


def test_an_array_has_the_pending_runs_only(tmp_path) -> None:
    sweep = sweep_of(tmp_path, overrides=TEN, workers=2)
    first = Trial(0, {"optimizer.lr": 0.001, "optimizer.weight_decay": 0.0})
    folder = sweep.folder / first.run_name(0)
    folder.mkdir(parents=True)
    (folder / "status.json").write_text('{"state": "finished"}')
    (folder / "metrics.jsonl").write_text('{"step": 10, "loss": 1.0, "tokens": 5}\n')
    assert len(pending(sweep)) == 11
    script = job_array(sweep)
    assert "#SBATCH --array=0-10%2" in script
    assert script.count("options=(--config debug") == script.count("--train.steps=10") == 11
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_results_are_ranked_by_their_mean_over_seeds(tmp_path) -> None:
    trials = [Trial(n, {"optimizer.lr": 0.1 * n}) for n in range(3)]
    results = [
        Result(trials[0], [2.0, 4.0], ["finished"] * 2, 10),
        Result(trials[1], [1.0], ["finished", "waiting"], 5),
        Result(trials[2], [2.5, 2.5], ["finished"] * 2, 10),
    ]
    assert [row["trial"] for row in rows(results, ["optimizer.lr"])] == [2, 0, 1]
    assert result_of(sweep_of(tmp_path), trials[0]).states == ["waiting", "waiting"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("keys = {}", "config: Field required"),
        ('config = "debug"\nwokers = 2\nkeys = {}', 'wokers: no such key; did you mean "workers"'),
        ('config = "debug"\nmethod = "best"\nkeys = {}', "method: Input should be"),
        ('config = "debug"\nkeys = { "train.stepps" = [1] }', "did you mean train.steps"),
        ('config = "debug"\nkeys = { "optimizer.lr" = { low = 1.0, high = 2.0 } }', "a list of values"),
        (
            'config = "debug"\nmethod = "random"\nkeys = { "optimizer.lr" = { low = 2.0, high = 1.0 } }',
            "low below high",
        ),
        ('config = "debug"\nkeys = { "optimizer.lr" = [] }', "has no values"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, text: str, sentence: str) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_sweep(file)
