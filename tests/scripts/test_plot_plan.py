"""Drawings of a plan show every part of a step, and every action of a pipeline."""

import errno
import json
import os
import re
import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "plot_plan.py"))


def peak(phase: str, part: str, state: int, activations: int) -> dict:
    size = {"state": state, "activations": activations}
    return {"phase": phase, "part": part, "microbatch": 0, "bytes": size}


def plan(timeline: list | None) -> dict:
    peaks = [
        peak("forward", "layers.0", 2**30, 0),
        peak("forward", "layers.9", 2**30, 2**30),
        peak("backward", "layers.9", 2**30, 2**31),
        peak("update", "", 2**30, 0),
    ]
    stage = {"rank": 4, "memory": {"peak": 3 * 2**30}, "peak": {"at": "backward of layers.9"}, "peaks": peaks}
    smaller = {"rank": 0, "memory": {"peak": 1}, "peak": {"at": ""}, "peaks": peaks[:1]}
    return {"stages": [smaller, stage], "timeline": timeline, "time": None}


def draw(folder: Path, timeline: list | None) -> int:
    (folder / "plan.json").write_text(json.dumps(plan(timeline)))
    return SCRIPT["main"](["--plan", str(folder / "plan.json"), "--output", str(folder / "drawings")])


def test_memory_is_drawn_for_the_stage_with_the_highest_peak(tmp_path: Path) -> None:
    assert draw(tmp_path, None) == 0
    text = (tmp_path / "drawings" / "memory.svg").read_text()
    assert "memory of rank 4 over one step: at most 3.00 GiB in the backward of layers.9" in text
    assert all(kind in text for kind in ("activations", "gathered", "forward", "backward", "update"))
    assert not (tmp_path / "drawings" / "pipeline.svg").exists()


def test_omitted_layers_keep_their_place() -> None:
    forward, *_, backward, update = SCRIPT["_places"](plan(None)["stages"][1]["peaks"])
    assert (update - backward) / (backward - forward) == 1 / 10


def test_a_pipeline_is_drawn_along_its_times(tmp_path: Path) -> None:
    assert draw(tmp_path, [[["0F0", 0, 1], ["0B0", 2, 4]], [["1F0", 1, 2]]]) == 0
    text = (tmp_path / "drawings" / "pipeline.svg").read_text()
    assert re.findall(r'id="pipeline-bar-(\d[FB]\d)"', text) == ["0F0", "0B0", "1F0"]
    assert "idle 50.0%" in text and "2 ranks, 2 stages" in text


@pytest.mark.parametrize("text", ["", "{}", "[]", "5", '{"stages": []}', '{"stages": [{}]}'])
def test_a_file_without_a_plan_is_refused(text: str, tmp_path: Path, capsys) -> None:
    (path := tmp_path / "plan.json").write_text(text)
    assert SCRIPT["main"](["--plan", str(path), "--output", str(tmp_path)]) == 2
    assert f"forge: --plan {path}: is not a plan" in capsys.readouterr().err


def test_a_full_disk_leaves_the_image_unchanged(tmp_path: Path, monkeypatch, capsys) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (folder := tmp_path / "drawings").mkdir()
    (folder / "memory.svg").write_text("earlier")
    monkeypatch.setattr(os, "fsync", full)
    assert draw(tmp_path, None) == 1
    assert f"{folder / 'memory.svg'}: No space left on device" in capsys.readouterr().err
    assert (folder / "memory.svg").read_text() == "earlier"
