"""A step with a non-finite loss or gradient changes nothing on any rank, and is counted."""

import pytest
import torch

from tests.support.runs import Run, tensor_files


@pytest.mark.planted("transient")
def test_n1_one_bad_gradient_on_one_rank_makes_all_skip_and_the_run_continues(tmp_path) -> None:
    run = Run(tmp_path)
    assert run.start(world=2, patch="tests.train.test_skips:spoil_step_3_on_rank_1").join() == [0, 0]
    lines = run.metrics()
    assert [line["step"] for line in lines if line.get("skipped")] == [3]
    assert lines[2]["grad_norm"] is None
    assert all(line["loss"] is not None for line in lines)


@pytest.mark.planted("transient")
def test_n1_a_skipped_step_leaves_parameters_moments_and_counters_unchanged(tmp_path) -> None:
    """The checkpoint after the spoiled third step equals the one after the second."""
    run = Run(tmp_path, "--checkpoint.interval=1", "--checkpoint.keep_last=100", "--train.steps=4")
    assert run.start(world=2, patch="tests.train.test_skips:spoil_step_3_on_rank_1").join() == [0, 0]
    assert tensor_files(run, 3) == tensor_files(run, 2)
    assert tensor_files(run, 4) != tensor_files(run, 3)


def test_too_many_bad_steps_in_a_row_end_the_run_with_a_diagnosis(tmp_path) -> None:
    run = Run(tmp_path, "--resilience.max_skipped_steps=3", "--train.steps=50")
    assert run.start(world=2, patch="tests.train.test_skips:spoil_every_step_from_5").join() == [1, 1]
    status = run.status()
    assert status["state"] == "failed" and "max_skipped_steps" in status["reason"]
    assert "Traceback" not in run.output()
    assert run.checkpoints()[-1] <= "step-00000006"


def test_x1_a_failing_sample_costs_a_warning(tmp_path) -> None:
    run = Run(tmp_path, "--train.steps=2", "--evaluate.sample_interval=2")
    assert run.start(patch="tests.train.test_skips:break_sampling").join() == [0]
    assert "no sample at step 2" in run.log()


def spoil_step_3_on_rank_1() -> None:
    _spoil(lambda step: step == 3, ranks=(1,))


def spoil_every_step_from_5() -> None:
    _spoil(lambda step: step >= 5, ranks=(0, 1))


def break_sampling() -> None:
    import forge.data.build as build
    import forge.tools.inference.text_samples as text_samples
    from forge.data.tokenizer import ByteTokenizer

    def fail(*_):
        raise RuntimeError("no words")

    text_samples.write_sample = fail
    build.build_tokenizer = lambda config: ByteTokenizer()


def _spoil(when, ranks) -> None:
    import torch.distributed as dist

    import forge.train.trainer as trainer

    report, step = trainer.report_gradients, [0]

    def spoiled(shards, loss, **asked):
        step[0] += 1
        if when(step[0]) and dist.get_rank() in ranks:
            next(shard for shard in shards if shard.boxes).grad.view(-1)[0] = torch.nan
        return report(shards, loss, **asked)

    trainer.report_gradients = spoiled
