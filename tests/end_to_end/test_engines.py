"""Whole runs under every data-parallel engine, and a run with another engine after each resume."""

from __future__ import annotations

import pytest

from tests.support.runs import Run, assert_same_history

ENGINES = ("ddp", "zero1", "zero2")


def test_another_engine_at_every_resume_changes_no_metric(tmp_path) -> None:
    whole = Run(tmp_path / "whole")
    assert whole("--parallel.data_parallel=fsdp2", world=2) == 0
    run = Run(tmp_path / "changing")
    for steps, engine, world in (
        (3, "zero1", 2),
        (5, "fsdp2", 1),
        (7, "ddp", 2),
        (9, "zero2", 2),
        (10, "zero1", 1),
    ):
        assert run(f"--parallel.data_parallel={engine}", f"--train.steps={steps}", world=world) == 0
    lines, expected = run.metrics(), whole.metrics()
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    assert run.losses() == pytest.approx(whole.losses(), rel=1e-5)
    assert [line["grad_norm"] for line in lines] == pytest.approx(
        [line["grad_norm"] for line in expected], rel=1e-4
    )
    assert run.losses()[-1] < run.losses()[0]
    assert "zero1: " in run.log() and "bytes per parameter on this rank" in run.log()


@pytest.mark.slow  # tests/equivalence/test_engines.py, which is fast, also resumes engines bit for bit
@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_run_continues_like_an_undisturbed_one(engine: str, tmp_path) -> None:
    options = (
        f"--parallel.data_parallel={engine}",
        "--parallel.bucket_size=3000",
        "--precision.compute=bfloat16",
    )
    whole, run = Run(tmp_path / "whole", *options), Run(tmp_path / "killed", *options)
    assert whole(world=2) == 0
    killed = run.start(world=2, fault="step:6:1").join()
    assert killed[1] == -9
    assert run(world=2) == 0
    assert_same_history(run, whole)


def test_experts_train_under_zero1(tmp_path) -> None:
    moe = '--model.moe={n_experts = 4, top_k = 2, expert_dim = 32, balance = "bias"}'
    options = (moe, "--parallel.data_parallel=zero1", "--parallel.ep=2", "--optimizer.lr=1e-2")
    run = Run(tmp_path, *options)
    assert run(world=2) == 0
    assert run.losses()[-1] < run.losses()[0] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("config", ["debug.toml", "moe_debug.toml"])
def test_a_shipped_config_trains_under_each_engine_on_one_curve(config: str, tmp_path) -> None:
    def losses(engine: str) -> list[float]:
        run = Run(tmp_path / engine, f"--parallel.data_parallel={engine}", "--optimizer.lr=1e-2")
        run._options = [option.replace("=debug.toml", f"={config}") for option in run._options]
        assert run(world=2) == 0
        return run.losses()

    expected = losses("fsdp2")
    assert expected[-1] < expected[0] - 0.1
    for engine in ENGINES:
        assert losses(engine) == pytest.approx(expected, rel=1e-4), engine


@pytest.mark.parametrize(
    "option",
    [
        "parallel.tp=2",
        "parallel.data_parallel=zero1",
        pytest.param("parallel.cp=2", marks=pytest.mark.slow),
    ],
)
def test_a_run_calls_nothing_deprecated_in_pytorch(option: str, tmp_path) -> None:
    run = Run(
        tmp_path, f"--{option}", "--resilience.check_replicas=true", "--resilience.straggler_interval=2"
    )
    patch = "tests.end_to_end.test_engines:deprecations_are_errors"
    assert run.start("--train.steps=4", patch=patch, world=2).join() == [0, 0], run.output()


def deprecations_are_errors() -> None:
    import warnings

    warnings.filterwarnings("error", category=FutureWarning)
