"""What a run does beside training fails: a warning, and training goes on."""

from __future__ import annotations

import numpy as np

from tests.end_to_end.runs import Run


def test_x1_held_out_data_that_one_rank_cannot_read_cost_a_warning(tmp_path) -> None:
    """Rank 1 alone meets the bad id; it stays with the others, and the next evaluation is tried again."""
    ids = np.arange(8 * 32 + 1, dtype="<u2") % 64
    ids[5 * 32 + 5] = 999
    ids.tofile(tmp_path / "held.bin")
    held = f'--data.validation=[{{name="held",path="{tmp_path / "held.bin"}",dtype="uint16"}}]'
    run, plain = Run(tmp_path / "run", held, "--evaluate.interval=4"), Run(tmp_path / "plain")
    options = ["--train.micro_batch_size=4"]
    assert run(*options, world=2) == 0 and plain(*options, world=2) == 0
    assert run.metrics() == plain.metrics()
    for step in (4, 8, 10):
        assert f"no evaluation at step {step}: reading failed on rank 1" in run.log(0)
    assert "held.bin: token id 999 at byte 330" in run.log(0)


def test_x1_a_board_that_cannot_be_written_costs_a_warning(tmp_path, undisturbed) -> None:
    run = Run(tmp_path, "--metrics.tensorboard=true")
    ranks = run.start(world=2, patch="tests.faults.test_side_systems:no_board")
    assert ranks.join() == [0, 0]
    assert run.log(0).count("TensorBoard is off from now on") == 1
    assert run.metrics() == undisturbed(world=2).metrics()


def no_board() -> None:
    import forge.observe.tensorboard as tensorboard

    def refuse(self):
        raise OSError("no board here")

    tensorboard.Board._make_writer = refuse
