"""A run changes its float8 recipe at every resume. Its checkpoints hold the same tensors as without float8."""

from __future__ import annotations

from pathlib import Path

from forge.checkpoint import read_state
from forge.checkpoint.folders import step_name
from tests.support.runs import EXPERTS, Run


def tensors(run: Run, step: int) -> set[str]:
    return set(read_state(run.path / "checkpoints" / step_name(step)))


def test_a_run_moves_between_recipes_and_reports_it(tmp_path: Path) -> None:
    run = Run(tmp_path, *EXPERTS)
    assert run("--train.steps=2") == 0
    plain = tensors(run, 2)
    recipes = ["mxfp8", "blockwise", "tensorwise", "none"]
    before = "none"
    for step, recipe in enumerate(recipes, start=2):
        assert run(f"--train.steps={2 * step}", f"--precision.float8={recipe}") == 0
        assert f"precision.float8 = {recipe} (was {before})" in run.output()
        assert tensors(run, 2 * step) == plain
        before = recipe
    losses = run.losses()
    assert len(losses) == 10 and losses[-1] < losses[0] + 0.5


def test_experts_follow_one_process_over_tensor_and_expert_parallelism(tmp_path: Path) -> None:
    options = (*EXPERTS, "--precision.float8=mxfp8", "--precision.float8_experts=true", "--train.steps=4")
    sides = ("--model.dim=64", "--model.n_kv_heads=4", "--precision.compute=float32")
    runs = [Run(tmp_path / name, *options, *sides) for name in ("one", "four")]
    assert runs[0]() == 0
    assert runs[1]("--parallel.tp=2", "--parallel.ep=2", world=4) == 0
    # Another order of summation moves a few values across a rounding boundary.
    assert max(abs(a - b) for a, b in zip(*(run.losses() for run in runs), strict=True)) < 5e-3
