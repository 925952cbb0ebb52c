"""In float64 forge trains like transformers, and the benchmark refuses to run without a peer."""

import math
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from benchmarks import side_by_side
from benchmarks.peers import transformers_loop
from benchmarks.peers.task import Curve, Task
from benchmarks.side_by_side import FLOAT64, MODELS, TINY, TURN, options_of, speeds, table, write_task
from forge.config import load_config
from tests.support.hf_models import float32_means
from tests.support.runs import Run

STEPS = 3
SYNTHETIC = (
    '--data.sources=[{path="synthetic",weight=1.0}]',
    "--data.validation=[]",
    "--model.vocab_size=64",
)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_forge_and_transformers_train_alike_in_float64(model: str, tmp_path: Path) -> None:
    options = [*options_of(model, STEPS), *TINY, *FLOAT64, *SYNTHETIC]
    task = write_task(load_config(["--config=debug.toml", *options]), tmp_path)
    base = ["--config=debug.toml", "--run.name=run"]
    run = Run(tmp_path / "forge", *options, "--train.micro_batch_size=8", base=base)
    assert run() == 0, run.output()
    with float32_means(torch.float64):
        theirs = transformers_loop.train(Task.load(task.folder), rank=0, world=1)
    ours = run.metrics()
    assert [line["loss"] for line in ours] == pytest.approx(theirs.losses, abs=1e-9, rel=0)
    assert [line["grad_norm"] for line in ours] == pytest.approx(theirs.norms, abs=1e-9, rel=0)
    assert [line["lr"] for line in ours] == theirs.rates
    # A different update would be visible: the losses change by far more than they differ.
    assert abs(theirs.losses[2] - theirs.losses[0]) > 1e-4


def test_the_ranks_of_a_task_cover_each_row_once(tmp_path: Path) -> None:
    options = [*options_of("Llama", STEPS), *TINY, *SYNTHETIC]
    task = write_task(load_config(["--config=debug.toml", *options]), tmp_path)
    parts = [task.rows_of(rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([tokens for tokens, _ in parts], dim=1), task.tokens)
    assert torch.equal(torch.cat([labels for _, labels in parts], dim=1), task.labels)
    assert len(task.rates) == len(task.tokens) == STEPS


def test_a_missing_peer_is_one_sentence(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(side_by_side, "PEERS", {"no-such-peer": "nothing"})
    assert side_by_side.main(["--tiny", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "forge: no-such-peer is not installed: `make side-by-side` installs it into an environment of its own; "
        "--only leaves it out\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_table_has_pairs_of_equal_processes_and_of_equal_packages() -> None:
    curve, other = Curve([3.0, 2.0], [1.0, 1.0], [0.1, 0.1]), Curve([3.0, 2.5], [1.0, 2.0], [0.1, 0.2])
    found = {"a, 1": curve, "b, 1": other, "a, 2": curve, "b, 2": curve}
    rows = [line.strip("| ").split(" | ") for line in table({"Llama": found}).splitlines()[2:]]
    assert [row[1:3] for row in rows] == [
        ["a, 1", "b, 1"],
        ["a, 1", "a, 2"],
        ["b, 1", "b, 2"],
        ["a, 2", "b, 2"],
    ]
    assert rows[0][3:6] == ["0.0e+00", "5.0e-01", "2"] and rows[3][4] == "0.0e+00"
    assert math.isclose(float(rows[0][8]), 0.5) and math.isclose(float(rows[0][9]), 0.1)


def test_a_speed_is_the_median_of_turns_without_the_first() -> None:
    """20 steps of 10 s, 20 of 1 s, 20 of 0.5 s, and 19 that fill no turn."""
    seconds = [10.0] * TURN + [1.0] * TURN + [0.5] * TURN + [0.1] * (TURN - 1)
    long, short = Curve(ended=list(accumulate(seconds))), Curve(ended=list(accumulate(seconds[:TURN])))
    found = speeds({"long, 1": long, "short, 1": short}, step_tokens=6)
    assert list(found) == ["long, 1"]
    rate = found["long, 1"]
    assert (rate.low, rate.median, rate.high, rate.rounds) == pytest.approx((6.0, 9.0, 12.0, 2))
