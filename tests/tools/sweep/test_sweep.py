"""Trials of a sweep. A sweep killed at any point ends with the table of an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from forge.config import load_config, to_toml
from forge.config.keys import from_literal, to_literal
from forge.runtime.errors import BAD_CONFIG, FINISHED, STOPPED, UserError
from forge.tools.sweep.local import run_sweep
from forge.tools.sweep.results import SweepResult, as_text, check_runs, metric_of, result_of, rows
from forge.tools.sweep.slurm import job_array, pending
from forge.tools.sweep.spec import Sweep, Trial, config_of, first_trials, next_trials, read_sweep
from scripts.sweep import main
from tests.support.runs import BASE, wait_for
from tests.support.trained import call

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
    with pytest.raises(UserError, match="tokens of one trial"):
        first_trials(sweep_of(tmp_path, budget_tokens=one - 1))


def test_the_budget_of_tokens_counts_every_rung(tmp_path) -> None:
    def spent(sweep: Sweep) -> int:
        total, trials = 0, first_trials(sweep)
        while trials:
            for trial in trials:
                train = config_of(sweep, trial).train
                total += train.steps * train.global_batch_size * train.seq_len * len(sweep.seeds)
            trials = next_trials(sweep, trials, {trial.number: 0.0 for trial in trials})
        return total

    keys: dict[str, Any] = {"method": "halving", "trials": 9, "rungs": 3, "eta": 3, "keys": RANDOM}
    whole = spent(sweep_of(tmp_path, **keys))
    for budget in (whole, whole - 1, whole * 2 // 3):
        sweep = sweep_of(tmp_path, **keys, budget_tokens=budget)
        assert spent(sweep) <= budget
    with pytest.raises(UserError, match="tokens of one trial"):
        first_trials(sweep_of(tmp_path, **keys, budget_tokens=whole // 10))


def test_halving_gives_the_best_longer_runs(tmp_path) -> None:
    sweep = sweep_of(tmp_path, method="halving", trials=9, rungs=3, eta=3, keys=RANDOM)
    first = first_trials(sweep)
    assert {trial.steps for trial in first} == {300 // 9}
    second = next_trials(sweep, first, {trial.number: float(-trial.number) for trial in first})
    assert [trial.number for trial in second] == [6, 7, 8] and {trial.steps for trial in second} == {99}
    third = next_trials(sweep, second, {7: 1.0, 6: 2.0})
    assert [(trial.number, trial.steps, trial.rung) for trial in third] == [(7, 300, 2)]
    assert next_trials(sweep, third, {7: 0.0}) == []


def test_halving_keeps_the_unit_of_the_recipes_length(tmp_path) -> None:
    """With equal tokens, a run of shorter sequences has more steps."""
    tokens = 9 * 16 * 128 * 10
    sweep = sweep_of(
        tmp_path,
        **{"method": "halving", "trials": 9, "rungs": 3, "eta": 3, "keys": RANDOM},
        overrides={"train.tokens": tokens},
    )
    first = first_trials(sweep)
    found = [config_of(sweep, trial).train for trial in first]
    assert {train.tokens for train in found} == {tokens // 9}
    assert {(train.seq_len, train.steps) for train in found} == {(64, 20), (128, 10)}
    second = next_trials(sweep, first, {trial.number: float(-trial.number) for trial in first})
    assert {config_of(sweep, trial).train.tokens for trial in second} == {tokens // 3}
    third = next_trials(sweep, second, {7: 1.0, 6: 2.0})
    assert config_of(sweep, third[0]).train.tokens == tokens


def test_halving_over_recipes_takes_their_length(tmp_path) -> None:
    """Not the length of the sweep's own recipe."""
    recipes = [str(tmp_path / f"{name}.toml") for name in ("short", "also_short", "long")]
    for recipe, steps in zip(recipes, (90, 90, 180), strict=True):
        Path(recipe).write_text(
            Path("configs/debug.toml").read_text().replace("steps = 300", f"steps = {steps}")
        )
    halving: dict[str, Any] = {"method": "halving", "trials": 4, "rungs": 2, "eta": 3}
    sweep = sweep_of(tmp_path, **halving, keys={"config": recipes[:2]})
    assert {trial.steps for trial in first_trials(sweep)} == {30}
    with pytest.raises(UserError, match="the recipes train for different numbers of steps or tokens"):
        first_trials(sweep_of(tmp_path, **halving, keys={"config": recipes}))
    sweep = sweep_of(tmp_path, **halving, keys={"config": recipes}, overrides={"train.steps": 60})
    assert {trial.steps for trial in first_trials(sweep)} == {20}


def test_the_metric_is_of_the_last_tenth_or_the_last_evaluation() -> None:
    lines: list[dict[str, Any]] = [{"step": step, "loss": float(step)} for step in range(1, 31)]
    assert metric_of(lines, "loss") == 29.0
    assert metric_of([*lines, {"step": 30, "loss": None}], "loss") is None
    lines += [{"step": 20, "eval": {"a": 2.0}}, {"step": 30, "eval": {"a": 1.5}}]
    assert metric_of(lines, "eval.a") == 1.5
    assert metric_of(lines, "eval.b") is None


def test_an_evaluation_before_the_last_step_is_no_result() -> None:
    """The evaluation after the last step may have failed."""
    lines: list[dict[str, Any]] = [{"step": step, "loss": 2.0} for step in range(1, 11)]
    assert metric_of([*lines, {"step": 5, "eval": {"a": 1.5}}], "eval.a") is None
    assert metric_of([*lines, {"step": 10, "eval": {"a": 1.5}}], "eval.a") == 1.5


def test_runs_of_two_sweeps_have_separate_mirrors(tmp_path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        Path("configs/debug.toml")
        .read_text()
        .replace("[checkpoint]", '[checkpoint]\nmirror = "s3://a/runs/"')
    )
    for keys in (
        {"config": str(recipe)},
        {"overrides": {"checkpoint.mirror": "s3://a/runs"}},
        {"keys": {"checkpoint.mirror": ["s3://a/runs"]}},
    ):
        mirrors = []
        for name in ("one", "two"):
            sweep = sweep_of(tmp_path, name=name, **keys)
            trial = first_trials(sweep)[0]
            mirrors.append(config_of(sweep, trial).checkpoint.mirror)
            assert load_config(trial.options(sweep, 0)).checkpoint.mirror == mirrors[-1]
        assert mirrors == ["s3://a/runs/one", "s3://a/runs/two"]
    unmirrored = sweep_of(tmp_path)
    assert config_of(unmirrored, first_trials(unmirrored)[0]).checkpoint.mirror == ""


@pytest.mark.processes
def test_a_recipe_that_becomes_invalid_stops_no_run_of_the_rung(tmp_path) -> None:
    """Every run of the rung starts with the options from before its first run."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(Path("configs/debug.toml").read_text())
    code = (
        "import runpy, sys\nfrom pathlib import Path\n"
        f"Path({str(recipe)!r}).write_text('[')\nrunpy.run_path({str(FAKE)!r})"
    )
    keys = {"optimizer.lr": [0.001, 0.003]}
    sweep = sweep_of(tmp_path, config=str(recipe), keys=keys, seeds=[0], overrides=TEN)
    results = run_sweep(sweep, lambda results: None, [sys.executable, "-c", code])
    assert [result.states for result in results] == [["finished"], ["finished"]]


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
        "import sys; from forge.tools.sweep.local import run_sweep; from forge.tools.sweep.spec import Sweep\n"
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
    (folder / "config.toml").write_text(to_toml(config_of(sweep, first)))
    assert len(pending(sweep)) == 11
    script = job_array(sweep)
    assert "#SBATCH --array=0-10%2" in script
    assert script.count("options=(--config debug") == script.count("--train.steps=10") == 11
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_results_are_ranked_by_their_mean_over_seeds(tmp_path) -> None:
    trials = [Trial(n, {"optimizer.lr": 0.1 * n}) for n in range(3)]
    results = [
        SweepResult(trials[0], [2.0, 4.0], ["finished"] * 2, 10),
        SweepResult(trials[1], [1.0], ["finished", "waiting"], 5),
        SweepResult(trials[2], [2.5, 2.5], ["finished"] * 2, 10),
    ]
    assert [row["trial"] for row in rows(results, ["optimizer.lr"])] == [2, 0, 1]
    assert result_of(sweep_of(tmp_path), trials[0]).states == ["waiting", "waiting"]


@pytest.mark.processes
@pytest.mark.long
def test_runs_with_other_values_are_refused_and_not_ranked(tmp_path) -> None:
    pairs = (option.removeprefix("--").split("=", 1) for option in BASE if not option.startswith("--config"))
    few = {key: from_literal(text, False) for key, text in pairs if key != "run.name"} | {"train.steps": 2}
    keys = {"overrides": few, "seeds": [0], "threads": 1}
    sweep = sweep_of(tmp_path, keys={"optimizer.lr": [0.001]}, **keys)
    (result,) = run_sweep(sweep, lambda results: None)
    assert result.done and run_sweep(sweep, lambda results: None) == [result]
    for edited, difference in (
        (
            sweep_of(tmp_path, keys={"optimizer.lr": [0.5]}, **keys),
            "optimizer.lr = 0.001, but the sweep has 0.5",
        ),
        (sweep_of(tmp_path, keys={"optimizer.weight_decay": [0.3]}, **keys), "optimizer.lr = 0.001"),
        (sweep_of(tmp_path, keys={"train.steps": [3]}, **keys), "train.steps = 2, but the sweep has 3"),
    ):
        for use in (lambda: run_sweep(edited, lambda results: None), lambda: job_array(edited)):  # noqa: B023
            with pytest.raises(UserError, match=difference):
                use()
    moved = sweep.folder.rename(tmp_path / "moved")
    assert run_sweep(sweep_of(tmp_path, name=moved.name, keys={"optimizer.lr": [0.001]}, **keys), print) == [
        result
    ]


def write_sweep(folder: Path, **keys: Any) -> Path:
    tree = {"config": "debug", "output_dir": str(folder), "overrides": TEN} | keys
    file = folder / "sweep.toml"
    file.write_text("".join(f"{key} = {to_literal(value)}\n" for key, value in tree.items()))
    return file


@pytest.mark.processes
def test_a_failed_trial_gives_exit_1_after_the_table_and_the_winner(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("forge.tools.sweep.local.command", lambda sweep: [sys.executable, str(FAKE)])
    file = write_sweep(tmp_path, keys={"optimizer.lr": [0.9, 0.003]})
    assert main([str(file)]) == 1
    printed = capsys.readouterr()
    assert "best: trial 1" in printed.out and "1 of 2 trials have no result: 0;" in printed.err
    assert "to repeat the failed runs, give" in printed.err and "ended without" not in printed.err
    assert main([str(write_sweep(tmp_path, name="good", keys={"optimizer.lr": [0.003]}))]) == 0


@pytest.mark.processes
def test_a_finished_run_without_the_metric_is_repeated_after_its_removal(
    tmp_path, monkeypatch, capsys
) -> None:
    """The same command alone would not repeat the run."""
    monkeypatch.setattr("forge.tools.sweep.local.command", lambda sweep: [sys.executable, str(FAKE)])
    file = write_sweep(tmp_path, metric="eval.python", keys={"optimizer.lr": [0.003]})
    assert main([str(file)]) == 1
    printed = capsys.readouterr().err
    assert "ended without eval.python: trial-000-rung-0-seed-0; to repeat, first remove the" in printed
    assert "to repeat the failed runs" not in printed


def test_a_finished_sweep_ends_with_0_without_matplotlib(tmp_path) -> None:
    file = write_sweep(tmp_path, keys={"optimizer.lr": [0.003]})
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import forge.tools.sweep.local as local; from scripts.sweep import main\n"
        "local.command = lambda sweep: [sys.executable, sys.argv[2]]\n"
        "sys.exit(main(sys.argv[1:2]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(file), str(FAKE)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "best: trial 0" in ended.stdout and "no page: " in ended.stdout


RANKS = """
import os, sys, time
from pathlib import Path
from forge.runtime.world import join, read_world
join(read_world())
Path(sys.argv[1], "rank-" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.long
def test_the_ranks_of_a_killed_sweep_end_with_it(tmp_path) -> None:
    ranks = tmp_path / "ranks.py"
    ranks.write_text(RANKS)
    sweep = sweep_of(tmp_path, processes=2, threads=1, overrides=TEN)
    code = (
        "import sys; from forge.tools.sweep.local import run_sweep; from forge.tools.sweep.spec import Sweep\n"
        "launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2']\n"
        "run_sweep(Sweep.model_validate_json(sys.argv[1]), lambda results: None, [*launch, *sys.argv[2:]])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, sweep.model_dump_json(), str(ranks), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    files = [tmp_path / "rank-0", tmp_path / "rank-1"]
    try:
        wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    finally:
        process.kill()
        process.wait()
    for file in files:
        wait_for(lambda: not alive(int(file.read_text())))  # noqa: B023


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# A run stopped before its first save. With LOSS in the environment it fails instead.
STOPPED_RUN = """
import json, os, sys
from pathlib import Path
value = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[3:])
folder = Path(json.loads(value["run.output_dir"])) / json.loads(value["run.name"])
folder.mkdir(parents=True, exist_ok=True)
state, code = ("failed", 9) if "FAIL" in os.environ else ("stopped", 75)
print("one turn")
turn = len(list(folder.glob("turn-*")))
(folder / f"turn-{turn}").touch()
(folder / "status.json").write_text(json.dumps({"state": state, "exit_code": code, "turn": turn}))
sys.exit(code)
"""


@pytest.mark.parametrize("name", ["sweep", 'it\'s a "new" $sweep; 100%'])
def test_an_array_task_gives_the_exit_code_of_its_run_and_is_requeued_twice_without_progress(
    tmp_path, name: str, monkeypatch
) -> None:
    run, calls = tmp_path / "run.py", tmp_path / "bin"
    run.write_text(STOPPED_RUN)
    monkeypatch.setattr("forge.tools.sweep.slurm.command", lambda sweep: [sys.executable, str(run)])
    sweep = sweep_of(tmp_path, name=name, overrides=TEN, keys={"optimizer.lr": [0.003]}, seeds=[0])
    sweep.folder.mkdir()
    calls.mkdir()
    (calls / "scontrol").write_text('#!/bin/bash\necho "$*" >> "$CALLS"\n')
    (calls / "scontrol").chmod(0o755)
    script = tmp_path / "array.sbatch"
    script.write_text(job_array(sweep))
    environment = os.environ | {"CALLS": str(calls / "log"), "PATH": f"{calls}:{os.environ['PATH']}"}
    environment |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}

    def turn(**more: str) -> int:
        return subprocess.run(["bash", str(script)], env=environment | more, check=False).returncode

    assert [turn(), turn(), turn()] == [0, 0, 75]
    assert (calls / "log").read_text() == "requeue 7_0\n" * 2
    log = (sweep.folder / "slurm-7-0.log").read_text()
    assert log.count("one turn") == 3 and "3 consecutive job runs have saved nothing new" in log
    assert turn(FAIL="1") == 9


def test_an_array_task_outside_a_job_array_is_one_sentence(tmp_path) -> None:
    found = call(tmp_path, "slurm/array_task", "run", "true")
    assert found.code == BAD_CONFIG and "SLURM_ARRAY_JOB_ID is not set" in found.err
    assert call(tmp_path, "slurm/array_task", "--help").code == FINISHED


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
        ('config = "debug"\nkeys = { "run.seed" = [0, 1] }', "run.seed: is set by the sweep; use seeds"),
        (
            'config = "debug"\nmethod = "halving"\nkeys = { "train.steps" = [4, 8] }',
            "train.steps: is set by method = halving",
        ),
        (
            'config = "debug"\nmethod = "halving"\nkeys = { "checkpoint.resume" = ["runs/a"] }',
            "checkpoint.resume = 'runs/a': method = halving trains every run from step 0",
        ),
        (
            'config = "debug"\nkeys = {}\noverrides = { "checkpoint.mirror" = "s3://a/runs" }',
            "name: is missing; with checkpoint.mirror a sweep needs a name",
        ),
        ('config = "debug"\nseeds = []\nkeys = {}', "needs at least one value, each once"),
        ('config = "debug"\nmetric = "accuracy"\nkeys = {}', "is not measured. Known: loss"),
        ('config = "debug"\nmetric = "eval.pyhton"\nkeys = {}', 'did you mean "eval.python"'),
        ('config = "debug"\nname = "a\\n#SBATCH -w x"\nkeys = {}', "name: 'a.*must be one line of text"),
        ('config = "debug"\noutput_dir = "a\\rb"\nkeys = {}', "output_dir: .*must be one line of text"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, text: str, sentence: str) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_sweep(file)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("more", "code", "stops"),
    [
        ({}, 1, True),
        ({}, 75, True),
        ({"refused": 2}, 1, False),
        ({"final": True}, 1, False),
        ({"final": True}, 75, False),
    ],
)
def test_a_run_stopped_by_a_signal_stops_the_sweep(
    tmp_path, more: dict[str, Any], code: int, stops: bool
) -> None:
    """torchrun ends with 1 after a stop, so only status.json tells. A refused start keeps the state of the start before.
    `final`: a hook has stopped the run."""
    status = json.dumps({"state": "stopped"} | more)
    script = tmp_path / "stopping.py"
    script.write_text(
        "import json, sys\nfrom pathlib import Path\n"
        "given = dict(one.removeprefix('--').split('=', 1) for one in sys.argv[3:])\n"
        "folder = Path(json.loads(given['run.output_dir'])) / json.loads(given['run.name'])\n"
        "folder.mkdir(parents=True)\n"
        f"(folder / 'status.json').write_text({status!r})\nsys.exit({code})\n"
    )
    sweep = sweep_of(tmp_path, keys={"optimizer.lr": [0.1]}, seeds=[0], overrides=TEN)
    with pytest.raises(UserError, match="a run was stopped") if stops else nullcontext() as error:
        run_sweep(sweep, lambda results: None, [sys.executable, str(script)])
    assert not stops or error.value.exit_code == STOPPED


def finish(sweep: Sweep, trial: Trial, state: str, changes: dict[str, Any] | None = None) -> None:
    """Write the directory of a run of `trial` that ended in `state`. changes: keys of [train] changed by a fallback."""
    folder = sweep.folder / trial.run_name(0)
    folder.mkdir(parents=True)
    config = config_of(sweep, trial)
    phases = tuple(phase.model_copy(update=changes or {}) for phase in config.phase)
    config = config.model_copy(
        update={"train": config.train.model_copy(update=changes or {}), "phase": phases}
    )
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "status.json").write_text(json.dumps({"state": state}))
    (folder / "metrics.jsonl").write_text('{"step": 10, "loss": 1.0, "tokens": 5}\n')


def test_an_array_of_the_next_rung_leaves_out_failed_trials(tmp_path) -> None:
    sweep = sweep_of(tmp_path, method="halving", trials=9, rungs=2, eta=3, keys=RANDOM, seeds=[0])
    first = first_trials(sweep)
    for trial in first[:-1]:
        finish(sweep, trial, "finished")
    assert [trial for trial, _ in pending(sweep)] == [first[-1]]
    finish(sweep, first[-1], "failed")
    assert len(pending(sweep)) == 3 and all(trial.rung == 1 for trial, _ in pending(sweep))


def test_a_run_that_used_a_fallback_belongs_to_the_sweep(tmp_path) -> None:
    fallback = {"parallel.fallbacks": ["train.micro_batch_size=1"], "phase": [{"lr": 0.5}]}
    sweep = sweep_of(tmp_path, keys={"optimizer.lr": [0.1]}, seeds=[0], overrides=TEN | fallback)
    (trial,) = first_trials(sweep)
    finish(sweep, trial, "finished", {"micro_batch_size": 1})
    check_runs(sweep, [trial])
    with pytest.raises(UserError, match=r"train\.micro_batch_size = 1"):
        check_runs(sweep_of(tmp_path, keys={"optimizer.lr": [0.1]}, seeds=[0], overrides=TEN), [trial])
    other = TEN | fallback | {"phase": [{"lr": 0.6}]}
    with pytest.raises(UserError, match="was made with phase = "):
        check_runs(sweep_of(tmp_path, keys={"optimizer.lr": [0.1]}, seeds=[0], overrides=other), [trial])


def test_a_run_that_an_older_version_started_belongs_to_the_sweep(tmp_path) -> None:
    """Today a folder must not begin with ~. The folder of the runs does not count as a difference."""
    sweep = sweep_of(tmp_path, keys={"optimizer.lr": [0.1]}, seeds=[0], overrides=TEN)
    (trial,) = first_trials(sweep)
    finish(sweep, trial, "finished")
    stored = sweep.folder / trial.run_name(0) / "config.toml"
    folder = json.dumps(config_of(sweep, trial).run.output_dir)
    assert stored.read_text().count(folder) == 1
    stored.write_text(stored.read_text().replace(folder, '"~/runs"'))
    check_runs(sweep, [trial])


def test_a_refused_start_of_a_stopped_run_counts_as_failed(tmp_path) -> None:
    """Otherwise a sweep in Slurm would wait for it, and submit it again, for ever."""
    sweep = sweep_of(tmp_path, keys={"optimizer.lr": [0.1]}, seeds=[0], overrides=TEN)
    (trial,) = first_trials(sweep)
    finish(sweep, trial, "stopped")
    assert result_of(sweep, trial).states == ["stopped"]
    status = sweep.folder / trial.run_name(0) / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"refused": 77}))
    assert result_of(sweep, trial).states == ["failed"]


@pytest.mark.parametrize(("metric", "result"), [("loss", 1.0), ("eval.python", 2.0), ("eval.prose", None)])
def test_a_run_that_a_hook_ended_is_ranked_and_not_started_again(
    tmp_path, metric: str, result: float | None
) -> None:
    """The hook asks for the end after an evaluation. The run then makes at most two more steps."""
    sweep = sweep_of(tmp_path, metric=metric, keys={"optimizer.lr": [0.1]}, seeds=[0], overrides=TEN)
    (trial,) = first_trials(sweep)
    finish(sweep, trial, "stopped")
    assert pending(sweep) == [(trial, 0)]
    folder = sweep.folder / trial.run_name(0)
    (folder / "status.json").write_text(json.dumps({"state": "stopped", "final": True}))
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 8, "eval": {"python": 2.0}}\n')
    (row,) = rows([result_of(sweep, trial)], [])
    assert (row["state"], row["result"]) == ("no result" if result is None else "ended early", result)
    assert pending(sweep) == []
    run_sweep(sweep, lambda results: None, ["false"])  # starts no process
