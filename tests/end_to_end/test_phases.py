"""Runs through phases, resumed at any step and on any layout, and compared with separate runs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.runs import FLOAT64, Run, assert_same_history, tensor_files

TWO = '--data.sources=[{path="synthetic",weight=1.0},{path="synthetic",weight=3.0}]'
# Steps 1 to 4 are in the first phase, 5 to 9 in the ramp, the others in none.
PHASES = [
    TWO,
    "--train.steps=12",
    "--schedule.name=wsd",
    "--schedule.unit=tokens",
    "--schedule.lr_rule=sqrt",
    "--model.sliding_window=16",
    "--phase=[{until_tokens=500,global_batch_size=8,seq_len=16,document_mask=true,sliding_window=8},"
    "{until_tokens=2000,ramp='linear',global_batch_size=24,micro_batch_size=1,weights=[3.0,1.0],"
    "lr=1e-3,weight_decay=0.5,betas=[0.8,0.9],sliding_window=32}]",
]


def test_a_run_stopped_in_every_phase_and_at_each_border_is_the_same_bit_for_bit(tmp_path) -> None:
    whole, parts = Run(tmp_path / "whole", *PHASES), Run(tmp_path / "parts", *PHASES)
    assert whole() == 0
    assert len({(line["lr"], line["tokens"]) for line in whole.metrics()}) == 12
    for step in (2, 4, 5, 7, 10):
        assert parts(fault=f"step:{step}:*:signal") == 75
    assert parts() == 0
    assert_same_history(parts, whole)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, []),
        pytest.param(2, ["--parallel.tp=2"], marks=pytest.mark.slow),
        pytest.param(2, ["--parallel.cp=2"], marks=pytest.mark.slow),
        pytest.param(2, ["--parallel.pp=2"], marks=pytest.mark.slow),
        pytest.param(2, ["--parallel.data_parallel=zero2"], marks=pytest.mark.slow),
        pytest.param(4, ["--parallel.pp=2", "--parallel.tp=2"], marks=pytest.mark.slow),
    ],
)
def test_a_layout_has_the_curve_of_one_process_through_all_phases(
    tmp_path, world: int, layout: list[str]
) -> None:
    alone, spread = Run(tmp_path / "alone", *PHASES, *FLOAT64), Run(tmp_path / "spread", *PHASES, *FLOAT64)
    assert alone() == 0
    assert spread(*layout, world=world) == 0
    for a, b in zip(alone.metrics(), spread.metrics(), strict=True):
        assert (a["tokens"], a["lr"]) == (b["tokens"], b["lr"])
        assert a["loss"] == pytest.approx(b["loss"], rel=0, abs=1e-9)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0, abs=1e-9)


# From token 1,000 on, the second source's weight grows until it has been read twice.
CAPPED = ["--phase=[{until_tokens=1000},{until_tokens=2500,weights=[1.0,3.0],ramp='linear'}]"]


@pytest.mark.parametrize(
    "mixture", [["--data.temperature=2.0"], pytest.param(CAPPED, marks=pytest.mark.slow)], ids=str
)
def test_any_number_of_processes_reads_capped_sources_alike(tmp_path, mixture: list[str]) -> None:
    rng = np.random.default_rng(0)
    paths = []
    for name, tokens in (("large", 9000), ("small", 300)):
        (tmp_path / f"{name}.bin").write_bytes(rng.integers(0, 64, tokens).astype("<u2").tobytes())
        paths.append(f'{{path="{tmp_path / name}.bin",dtype="uint16",name="{name}",max_epochs=2.0}}')
    options = [
        *FLOAT64,
        *mixture,
        f"--data.sources=[{','.join(paths)}]",
        "--train.steps=20",
        "--data.tokenizer=none",
    ]
    alone, spread = Run(tmp_path / "alone", *options), Run(tmp_path / "spread", *options)
    assert alone() == 0
    assert "sources that have reached max_epochs are not read" in alone.output()
    assert spread(fault="step:9:*:signal", world=2) == 75
    assert spread(world=2) == 0
    for a, b in zip(alone.metrics(), spread.metrics(), strict=True):
        assert a["epochs"] == b["epochs"]
        assert a["loss"] == pytest.approx(b["loss"], rel=0, abs=1e-9)
    assert alone.metrics()[-1]["epochs"]["small"] == 2.0


def test_two_phases_equal_two_separate_runs(tmp_path) -> None:
    first = ["--train.global_batch_size=4", "--optimizer.lr=1e-3", "--optimizer.weight_decay=0.4"]
    phase = "{until_tokens=512,global_batch_size=4,lr=1e-3,weight_decay=0.4,weights=[3.0,1.0]}"
    weights = TWO.replace("1.0", "x").replace("3.0", "1.0").replace("x", "3.0")
    phased, by_hand = Run(tmp_path / "phased", TWO, f"--phase=[{phase}]"), Run(tmp_path / "hand")
    assert phased() == 0
    assert by_hand(weights, *first, "--train.steps=4") == 0
    assert by_hand(TWO, "--checkpoint.allow_changed_data=true") == 0
    assert phased.metrics() == by_hand.metrics()
    assert tensor_files(phased, 10) == tensor_files(by_hand, 10)
