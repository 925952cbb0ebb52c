"""The picture of a schedule shows each computation once, at its rank and time."""

import re
import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "plot_pipeline.py"))


def actions(path: Path) -> list[str]:
    """Return the actions of a drawn timeline, e.g. 0F3."""
    return re.findall(r'id="pipeline-bar-(\d+[FBIW]\d+)"', path.read_text())


@pytest.mark.parametrize(("schedule", "blocks"), [("1F1B", 2 * 4 * 2), ("ZBVZeroBubble", 4 * 4 * 3)])
def test_every_computation_is_drawn_once(tmp_path: Path, schedule: str, blocks: int, capsys) -> None:
    path = tmp_path / "timeline.svg"
    arguments = ["--schedule", schedule, "--ranks", "2", "--microbatches", "4", "--output", str(path)]
    assert SCRIPT["main"](arguments) == 0 and "idle" in capsys.readouterr().out
    titles = actions(path)
    assert len(titles) == len(set(titles)) <= blocks
    assert {"0F0", "1F3"} <= set(titles)


def test_whole_backwards_have_no_halves(tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    assert SCRIPT["main"](["--schedule", "DualPipeV", "--whole-backward", "--output", str(path)]) == 0
    assert not [action for action in actions(path) if re.search("[IW]", action)]


@pytest.mark.parametrize(("name", "hint"), [("nonsense", "DualPipeV"), ("gpipe", 'did you mean "GPipe"?')])
def test_an_unknown_schedule_is_refused(name: str, hint: str, tmp_path: Path, capsys) -> None:
    assert SCRIPT["main"](["--schedule", name, "--output", str(tmp_path / "a.svg")]) == 2
    assert f"--schedule {name}: must be one of" in (text := capsys.readouterr().err) and hint in text


@pytest.mark.parametrize("option", ["--ranks", "--microbatches", "--stages-per-rank"])
def test_a_count_of_nothing_is_refused(option: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        SCRIPT["main"](["--schedule", "1F1B", option, "0"])
    assert f"{option}: must be at least 1" in capsys.readouterr().err
