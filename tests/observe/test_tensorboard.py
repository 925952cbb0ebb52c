import sys

import pytest

from forge.observe.tensorboard import Board


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def curve(folder, tag):
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def test_scalars_and_texts_read_back(tmp_path):
    with Board(tmp_path) as board:
        for step in (1, 2):
            board.scalars(step, {"train/loss": 4.0 / step, "train/mfu": None})
        board.text(2, "sample", "def f():\n    pass")
    assert curve(tmp_path, "train/loss") == [(1, 4.0), (2, 2.0)]
    assert read(tmp_path).Tags()["scalars"] == ["train/loss"]
    (text,) = read(tmp_path).Tensors("sample/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "    def f():\n        pass"


def test_a_resumed_run_hides_repeated_steps(tmp_path):
    with Board(tmp_path) as board:
        for step in (1, 2, 3, 4):
            board.scalars(step, {"loss": 1.0})
    with Board(tmp_path, after_step=2) as board:
        board.scalars(3, {"loss": 2.0})
    assert curve(tmp_path, "loss") == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_flush_writes_everything_to_the_file(tmp_path):
    board = Board(tmp_path)
    board.scalars(1, {"loss": 1.0})
    board.flush()
    assert curve(tmp_path, "loss") == [(1, 1.0)]
    board.close()


@pytest.mark.parametrize("fault", ["a file in its place", "no package"])
def test_x1_a_failure_is_one_warning_and_turns_tensorboard_off(tmp_path, monkeypatch, caplog, fault):
    if fault == "no package":
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    folder = tmp_path / "tensorboard"
    folder.write_text("")
    with Board(folder) as board:
        for step in range(3):
            board.scalars(step, {"loss": 1.0})
        board.text(3, "sample", "text")
        board.flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "TensorBoard is off" in caplog.text


def test_a_disabled_or_unused_tensorboard_writes_nothing(tmp_path):
    with Board(tmp_path / "off", enabled=False) as board:
        board.scalars(1, {"loss": 1.0})
        board.text(1, "sample", "text")
    with Board(tmp_path / "unused"):
        pass
    assert list(tmp_path.iterdir()) == []
