"""Defects that have cost other projects weeks, each planted on purpose and caught by its test."""

import os
import signal

import pytest

import tests.support.equivalence as compare
from tests.support.equivalence import assert_equal, layout, reference, tiny_config
from tests.support.harness import RankFailed, run_ranks
from tests.support.runs import Run, wait_for


def test_a_mean_of_per_rank_means_is_not_the_loss() -> None:
    """Ranks have different numbers of valid tokens. Dividing by the rank's own number changes the loss and gradients."""
    text = tiny_config(micro=2)
    assert_equal(layout(text, 2), reference(text))
    ranks = run_ranks(_with_local_token_counts, 2, text)
    with pytest.raises(AssertionError, match="differs by"):
        assert_equal(ranks, reference(text))


def _with_local_token_counts(rank: int, world: int, text: str):
    from forge.parallel.step.model import SequentialModel

    SequentialModel.count_tokens = lambda self, batch: (batch.labels >= 0).sum().double()
    return compare.layout_on_rank(rank, world, text)


def test_evaluation_is_over_all_ranks_data(tmp_path) -> None:
    """Two ranks evaluate different held-out sequences and report one rank's loss over all of them."""
    options = [
        '--data.validation=[{name="held",path="synthetic"}]',
        "--evaluate.interval=2",
        "--evaluate.sequences=5",
        "--data.document_mask=true",
        "--train.steps=2",
        *[f"--precision.{key}=float64" for key in ("storage", "compute", "reduce")],
    ]
    one, two = Run(tmp_path / "one", *options), Run(tmp_path / "two", *options)
    assert one() == 0 and two(world=2) == 0
    alone, shared = one.metrics()[-1]["eval"]["held"], two.metrics()[-1]["eval"]["held"]
    assert alone == pytest.approx(shared, rel=0, abs=1e-9)


def test_evaluation_on_rank_0s_share_alone_is_caught(tmp_path) -> None:
    options = [
        '--data.validation=[{name="held",path="synthetic"}]',
        "--evaluate.interval=2",
        "--evaluate.sequences=5",
        "--train.steps=2",
    ]
    one, two = Run(tmp_path / "one", *options), Run(tmp_path / "two", *options)
    assert one() == 0
    assert two.start(world=2, patch="tests.end_to_end.test_traps:only_the_first_ranks_share").join() == [0, 0]
    assert abs(one.metrics()[-1]["eval"]["held"] - two.metrics()[-1]["eval"]["held"]) > 1e-4


def only_the_first_ranks_share() -> None:
    import forge.train.evaluate as evaluate

    every = evaluate.evaluation_batches

    def share_of_the_first(source, **arguments):
        return every(source, **(arguments | {"rank": 0}))

    evaluate.evaluation_batches = share_of_the_first


@pytest.mark.slow
def test_an_unshared_stop_flag_is_caught(tmp_path) -> None:
    """Planted: each rank acts on its own flag. Rank 1 stops alone, and the run does not end in good order."""
    run = Run(tmp_path, "--train.steps=100000", "--checkpoint.interval=0")
    ranks = run.start(world=2, patch="tests.end_to_end.test_traps:act_on_ones_own_flag")
    wait_for(lambda: run.stepping)
    os.kill(ranks.pids[1], signal.SIGTERM)
    with pytest.raises((RankFailed, AssertionError)):
        assert ranks.join(timeout=8) == [75, 75]


def act_on_ones_own_flag() -> None:
    from forge.train.trainer import Trainer

    step = Trainer.step

    def acting_alone(self) -> None:
        step(self)
        self.results.stop_requested = self.signals.reason is not None

    Trainer.step = acting_alone


@pytest.mark.slow
def test_a_resume_from_the_start_of_the_data_is_caught(tmp_path) -> None:
    """Planted: a resume without the data position. The history then differs from the undisturbed one."""
    whole, halves = Run(tmp_path / "whole"), Run(tmp_path / "halves")
    assert whole() == 0
    assert halves("--train.steps=5") == 0
    assert halves.start(patch="tests.end_to_end.test_traps:forget_the_data").join() == [0]
    assert halves.metrics()[:5] == whole.metrics()[:5]
    assert halves.metrics()[5:] != whole.metrics()[5:]


def forget_the_data() -> None:
    import forge.train.trainer as trainer

    loader = trainer.Loader
    trainer.Loader = lambda dataset, **arguments: loader(dataset, **(arguments | {"start_sample": 0}))


def test_a_half_written_folder_is_not_resumed_from(tmp_path) -> None:
    """A folder of a later step without its manifest is not loaded, and causes no endless restarts."""
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "run")
    assert whole() == 0
    assert run("--train.steps=4") == 0
    half = run.path / "checkpoints" / "step-00000008"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half of a shard")
    assert run() == 0
    assert run.metrics() == whole.metrics()
