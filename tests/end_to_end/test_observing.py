"""A run's reports about itself: memory, traces, and remedies for an out-of-memory error."""

import pytest

from tests.support.runs import Run


def test_a_run_reports_its_memory_and_profiles_the_chosen_steps(tmp_path) -> None:
    run = Run(tmp_path, "--train.steps=4", "--profile.span=[2,3]", "--profile.ranks=[1,2]")
    assert run(world=2) == 0
    [memory] = [event for event in run.events() if event["event"] == "memory"]
    assert memory["optimizer_bytes"] == 2 * memory["parameters_bytes"] > 0
    assert "memory of this rank" in run.output()
    assert [path.name for path in (run.path / "profile").iterdir()] == ["rank-1-steps-2-3.json.gz"]
    assert "profile.ranks: the run has no rank 2" in run.log()


def test_a_custom_model_is_reported_as_built(tmp_path) -> None:
    kind = "--model.kind=tests.support.small_models:Wider"
    run = Run(tmp_path, "--train.steps=1", kind, '--optimizer.no_decay=["mixer", "*.mixer.weight"]')
    assert run() == 0
    built_in = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32 + 2 * 64 * 32
    total = built_in + 32 * 32 + 5 * 32 * 32
    assert f"{total:,} parameters ({total - 32 * 32:,} active)" in run.output()
    (unused,) = [line for line in run.output().splitlines() if "set, but not used" in line]
    assert '"mixer" of optimizer.no_decay (matches no parameter)' in unused and "*.mixer.weight" not in unused


def test_a_profile_changes_no_metric(tmp_path) -> None:
    plain, profiled = (
        Run(tmp_path / "plain", "--train.steps=3"),
        Run(tmp_path / "profiled", "--train.steps=3"),
    )
    assert plain() == 0 and profiled("--profile.span=[1,2]") == 0
    assert profiled.metrics() == plain.metrics()


@pytest.mark.slow  # tests/run/test_out_of_memory.py, which is fast, covers the plan
def test_x2_out_of_memory_prints_the_report_and_three_planned_keys_without_a_traceback(tmp_path) -> None:
    run = Run(tmp_path)
    assert run.start(patch="tests.end_to_end.test_observing:host_is_full", world=2).join() == [1, 1]
    # Each rank reports its memory by kind; one rank plans.
    reports, _, planned = run.output().partition("planned peak memory: ")
    assert len(_check_report(reports, run)) == 6 and "planned peak memory:" not in planned
    now = float(planned.split()[0])
    assert 0 < float(planned.partition("train.micro_batch_size = 1: ")[2].split()[0]) < now


def test_x2_if_planning_takes_too_long_the_report_has_three_keys(tmp_path) -> None:
    run = Run(tmp_path)
    assert run.start(patch="tests.end_to_end.test_observing:gpu_is_full").join() == [1]
    assert len(_check_report(run.output(), run)) == 3
    assert "the planner gave no result" in run.output()


def _check_report(output: str, run: Run) -> list[str]:
    assert "Traceback" not in output and "out of memory in step 1" in output
    assert "optimizer" in output and "GiB" in output
    assert run.status()["state"] == "failed" and run.status()["exit_code"] == 1
    keys = [line for line in output.splitlines() if line.startswith("  ") and " = " in line]
    assert "train.micro_batch_size = 1" in keys[0]
    return keys


def host_is_full() -> None:
    _raise_in_forward(
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.")
    )


def gpu_is_full() -> None:
    import torch

    from forge.run import out_of_memory

    out_of_memory.PLANNING_S = 0.01
    _raise_in_forward(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."))


def _raise_in_forward(error: Exception) -> None:
    from forge.parallel.step.model import SequentialModel

    def fail(*_: object) -> None:
        raise error

    SequentialModel.forward_backward = fail
