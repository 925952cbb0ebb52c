"""The picture of a run's losses is a valid SVG with a curve for each source of data."""

import json
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_loss.py"


def plot(folder: Path, lines: list[dict]) -> tuple[int, list[str]]:
    """Return the exit code and the picture's texts."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    picture = folder / "out.svg"
    arguments = [str(folder), "--output", str(picture), "--mark", "counts=3"]
    code = runpy.run_path(str(SCRIPT))["main"](arguments)
    found = ElementTree.parse(picture).iter() if picture.exists() else []
    return code, [element.text or "" for element in found if element.tag.endswith("}text")]


def test_a_curve_for_training_and_each_held_out_source(tmp_path) -> None:
    lines = [{"step": step, "loss": 4 - step / 50} for step in range(1, 41)]
    code, texts = plot(tmp_path, [*lines, {"step": 40, "eval": {"a": 3.5, "b": 3.25}}])
    assert code == 0
    assert {"training", "held out: a", "held out: b", "counts", "nats per token", "optimizer step"} <= {
        *texts
    }
    # Few points are drawn as markers: for both curves, and in the legend.
    assert len(re.findall(r"<use ", (tmp_path / "out.svg").read_text())) >= 4


def test_constant_losses_can_be_drawn(tmp_path, capsys) -> None:
    assert plot(tmp_path, [{"step": 1, "loss": 3.0}])[0] == 0
    assert capsys.readouterr().out.startswith("wrote ")


def test_runs_have_distinct_names_and_dashes(tmp_path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert plot(tmp_path / name, [{"step": step, "loss": 4.0} for step in range(1, 41)])[0] == 0
    picture = tmp_path / "both.svg"
    arguments = [str(tmp_path / "one"), str(tmp_path / "two"), "--output", str(picture)]
    assert runpy.run_path(str(SCRIPT))["main"](arguments) == 0
    text = picture.read_text()
    assert "one: training" in text and "two: training" in text and "stroke-dasharray" in text


def test_a_run_without_a_loss_has_nothing_to_draw(tmp_path, capsys) -> None:
    assert plot(tmp_path, [{"step": 1, "loss": None}]) == (2, [])
    assert ": no loss yet" in capsys.readouterr().err


def test_a_line_torn_by_a_kill_is_skipped(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    assert runpy.run_path(str(SCRIPT))["main"]([str(tmp_path), "--output", str(tmp_path / "out.svg")]) == 0


def test_an_error_is_one_sentence_and_exit_code_2(tmp_path, capsys) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"forge: {tmp_path} is not the directory of a run: ")
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--mark", "x"])
    assert "'x' must have the form NAME=LOSS" in capsys.readouterr().err
