"""A failure outside training, e.g. in evaluation or TensorBoard, costs a warning, and training continues."""

from __future__ import annotations

import os
from collections.abc import Container

import numpy as np
import pytest

from tests.support.runs import Run


def test_x1_held_out_data_unreadable_on_one_rank_cost_a_warning(tmp_path) -> None:
    """Only rank 1 reads the bad id. It stays in step with the others, and the next evaluation is tried again."""
    ids = np.arange(8 * 32 + 1, dtype="<u2") % 64
    ids[5 * 32 + 5] = 999
    ids.tofile(tmp_path / "held.bin")
    held = f'--data.validation=[{{name="held",path="{tmp_path / "held.bin"}",dtype="uint16"}}]'
    run, plain = Run(tmp_path / "run", held, "--evaluate.interval=4"), Run(tmp_path / "plain")
    options = ["--train.micro_batch_size=4"]
    assert run(*options, world=2) == 0 and plain(*options, world=2) == 0
    assert run.metrics() == plain.metrics()
    for step in (4, 8, 10):
        assert f"no evaluation at step {step}: {tmp_path}" in run.log(0)
    assert "held.bin: token id 999 at byte 330" in run.log(0)


def test_x1_an_unwritable_tensorboard_costs_a_warning(tmp_path, undisturbed) -> None:
    run = Run(tmp_path, "--metrics.tensorboard=true")
    ranks = run.start(world=2, patch="tests.faults.test_side_systems:no_board")
    assert ranks.join() == [0, 0]
    assert run.log(0).count("TensorBoard is off from now on") == 1
    assert run.metrics() == undisturbed(world=2).metrics()


def test_x1_a_failed_sample_on_all_ranks_costs_a_warning(tmp_path) -> None:
    plain, run = Run(tmp_path / "plain", *SAMPLES[:2]), Run(tmp_path / "run", *SAMPLES)
    assert plain(world=2) == 0
    patch = "tests.faults.test_side_systems:no_sample_on_any_rank"
    assert run.start(world=2, patch=patch).join() == [0, 0]
    assert all(
        "no sample at step 2: sampling failed on rank 0: ValueError: no words" in run.log(rank)
        for rank in (0, 1)
    )
    assert run.metrics() == plain.metrics()


@pytest.mark.planted("watchdog")
def test_x1_a_rank_failing_alone_in_a_sample_never_continues_without_the_others(tmp_path) -> None:
    """Its next collectives would mix with the sample's, so the watchdog ends the run, and the same command continues it."""
    run = Run(tmp_path, *SAMPLES, "--resilience.evaluate_timeout_s=5")
    patch = "tests.faults.test_side_systems:no_sample_on_rank_1"
    assert run.start(world=2, patch=patch).join() == [76, 76]
    assert "sampling failed on this rank" in run.log(1) and "ValueError: no words" in run.log(1)
    stacks = (run.path / "logs" / "stacks-rank-1.txt").read_text()
    assert "text_samples.py" in stacks and "in step" not in stacks


SAMPLES = ["--train.steps=3", "--model.vocab_size=320", "--evaluate.sample_interval=2"]


def no_sample_on_any_rank() -> None:
    _no_sample(("0", "1"))


def no_sample_on_rank_1() -> None:
    _no_sample(("1",))


def _no_sample(ranks: Container[str]) -> None:
    import forge.data.build as build
    import forge.tools.inference.text_samples as text_samples
    from forge.data.tokenizer import ByteTokenizer

    write = text_samples.write_sample

    def fail(*arguments):
        if os.environ["RANK"] in ranks:
            raise ValueError("no words")
        return write(*arguments)

    text_samples.write_sample = fail
    build.build_tokenizer = lambda config: ByteTokenizer()


def no_board() -> None:
    import forge.observe.tensorboard as tensorboard

    def refuse(self):
        raise OSError("no board here")

    tensorboard.Board._make_writer = refuse
