"""Runs with a pipeline have the loop, metrics and run directory of one process."""

import pytest

from tests.support.runs import EXPERTS, FLOAT64, Run, assert_same_history

MODEL = ["--model.n_layers=4", "--model.tie_embeddings=true", *EXPERTS]
PIPELINE = ["--parallel.pp=2", "--train.micro_batch_size=1"]
EVALUATED = ["--evaluate.interval=5", '--data.validation=[{name="held", path="synthetic"}]']


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("ZBVZeroBubble", marks=pytest.mark.slow)])
def test_a_stopped_run_continues_bit_for_bit(tmp_path, schedule: str) -> None:
    options = [*MODEL, *PIPELINE, f"--pipeline.schedule={schedule}"]
    whole, halves = Run(tmp_path / "whole", *options), Run(tmp_path / "halves", *options)
    assert whole(world=2) == 0
    assert halves(world=2, fault="step:5:*:signal") == 75
    assert halves(world=2) == 0
    assert_same_history(halves, whole)


def test_an_optimizer_whose_slots_differ_between_stages_continues(tmp_path) -> None:
    options = [*MODEL, *PIPELINE, "--pipeline.layers_per_stage=[0,4]", "--optimizer.name=muon", *FLOAT64]
    whole, halves = Run(tmp_path / "whole", *options), Run(tmp_path / "halves", *options)
    assert whole(world=2) == 0
    assert halves(world=2, fault="step:5:*:signal") == 75
    assert halves(world=2) == 0
    assert "starts from its initial values" not in halves.output()
    assert_same_history(halves, whole)


@pytest.mark.slow
def test_a_killed_pipeline_run_continues_without_pp_and_under_another_pipeline(tmp_path) -> None:
    alone, moved = (Run(tmp_path / name, *MODEL, *FLOAT64, *EVALUATED) for name in ("alone", "moved"))
    assert alone() == 0
    started = moved.start(*PIPELINE, "--pipeline.schedule=Interleaved1F1B", world=4, fault="step:5:1:kill")
    assert any(started.join())
    assert "pipeline of 4 stages" in moved.output()
    assert moved(world=2, fault="step:7:*:signal") == 75
    assert moved(*PIPELINE, "--pipeline.schedule=DualPipeV", "--parallel.tp=2", world=4) == 0
    for one, other in zip(alone.metrics(), moved.metrics(), strict=True):
        assert numbers(other) == pytest.approx(numbers(one), rel=0, abs=1e-8)


def numbers(line: dict, path: str = "") -> dict[str, float]:
    """Flatten a line of metrics, routers included, to path -> number."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            found |= numbers(value, f"{path}{name}.")
        else:
            values = value if isinstance(value, list) else [value]
            found |= {f"{path}{name}.{place}": number for place, number in enumerate(values)}
    return found


def test_too_few_microbatches_exit_2_with_the_required_number(tmp_path) -> None:
    run = Run(
        tmp_path, *MODEL, "--parallel.pp=2", "--pipeline.schedule=DualPipeV", "--train.micro_batch_size=4"
    )
    assert run(world=2) == 2
    assert "needs at least 4 microbatches" in run.output()
