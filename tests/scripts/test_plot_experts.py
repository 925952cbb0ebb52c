"""The picture of expert loads is a valid SVG with every layer and every expert."""

import json
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_experts.py"


def plot(folder: Path, lines: list[dict]) -> tuple[int, str]:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code = runpy.run_path(str(SCRIPT))["main"]([str(folder), "--output", str(folder / "out.svg")])
    return code, (folder / "out.svg").read_text() if (folder / "out.svg").exists() else ""


def line(step: int, counts: list[int] | None) -> dict:
    load = {"load_max": 1 + 1 / step} | ({} if counts is None else {"counts": counts})
    return {"step": step, "loss": 1.0, "routers": {"1": load, "3": load}}


@pytest.mark.long
def test_a_curve_for_each_layer_and_below_them_a_map_of_each(tmp_path) -> None:
    lines = [line(step, [5, 3, 0] if step % 2 else None) for step in range(1, 14)]
    code, text = plot(tmp_path, [*lines, {"step": 13, "eval": {"x": 1.0}}])
    drawings = [one for one in ElementTree.fromstring(text) if one.tag.endswith("}svg")]
    assert code == 0 and len(drawings) == 2
    curves, maps = ([one.text for one in drawing.iter() if one.tag.endswith("}text")] for drawing in drawings)
    assert {"layer 1", "layer 3", "even shares", "1.5"} <= {*curves}
    assert {"layer 1", "layer 3", "even shares"} <= {*maps}
    bottoms = [float(one.get("y", 0)) + float(one.get("height", 0)) for one in drawings]
    assert float(drawings[1].get("y", 0)) == bottoms[0]


def test_a_dense_run_has_nothing_to_draw(tmp_path, capsys) -> None:
    assert plot(tmp_path, [{"step": 1, "loss": 2.0}]) == (2, "")
    assert "has no expert counts" in capsys.readouterr().err
