"""Runs with Muon have one loss curve on any layout, through kills and layout changes. A run may change its optimizer."""

import pytest

from forge.checkpoint import read_state
from forge.checkpoint.folders import step_name
from forge.checkpoint.loading import TensorReader
from tests.support.runs import EXPERTS, FLOAT64, Run, assert_same_history

MUON = ["--optimizer.name=muon", "--optimizer.muon.second_moment=neuron", "--optimizer.muon.split_heads=true"]


@pytest.mark.slow
def test_muon_killed_and_moved_to_another_layout_and_engine_keeps_the_curve_of_one_process(tmp_path) -> None:
    options = [*FLOAT64, *EXPERTS, *MUON]
    whole, moved = Run(tmp_path / "whole", *options), Run(tmp_path / "moved", *options)
    assert whole() == 0
    moved.start("--parallel.ep=2", "--parallel.tp=2", world=4, fault="step:5:1:kill").join()
    compiled = ("--compile.optimizer=true", "--compile.backend=eager")
    assert moved("--parallel.data_parallel=zero1", *compiled, world=2) == 0
    for a, b in zip(whole.metrics(), moved.metrics(), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0, abs=1e-9)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0, abs=1e-9)
    assert whole.losses()[-1] < whole.losses()[0] - 0.2


def test_muon_resumed_on_the_same_layout_is_bit_identical(tmp_path) -> None:
    whole, halves = Run(tmp_path / "whole", *EXPERTS, *MUON), Run(tmp_path / "halves", *EXPERTS, *MUON)
    assert whole(world=2) == 0
    assert halves(world=2, fault="step:5:*:signal") == 75
    assert halves(world=2) == 0
    assert_same_history(halves, whole)


def test_a_run_with_a_new_optimizer_keeps_its_weights_and_starts_with_fresh_moments(tmp_path) -> None:
    run = Run(tmp_path / "changed")
    assert run("--train.steps=4") == 0
    assert run(*MUON, "--train.steps=8", "--optimizer.lr=1e-9", world=2) == 0
    afresh = "the optimizer state of adamw (exp_avg, exp_avg_sq), which is not loaded; the state of muon (exp_avg, "
    assert afresh + "exp_avg_sq, momentum, row_moment) starts from its initial values" in run.output()
    # At a learning rate of almost 0, the weights equal those of step 4.
    before, after = (TensorReader(run.path / "checkpoints" / step_name(step)) for step in (4, 8))
    weight = "model.layers.0.attention.wq.weight"
    assert (before.read(weight) - after.read(weight)).abs().max() < 1e-6
    assert read_state(run.path / "checkpoints" / step_name(8))["optimizer"] == {"updates": 4}
    # And back: a resume needs none of AdamW's lost state.
    assert run("--train.steps=10") == 0
    assert "the state of adamw (exp_avg, exp_avg_sq) starts from its initial values" in run.output()
