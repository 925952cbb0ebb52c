"""The refactoring table is reproducible, and finds a changed bit."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.refactoring.table import first_difference, main

RESULT: dict[str, Any] = {
    "codes": [[0, 0]],
    "metrics": [{"step": 1, "loss": 4.2, "grad_norm": 1.5}, {"step": 2, "loss": 4.1, "grad_norm": math.nan}],
    "decisions": [{"event": "spike", "step": 2, "limits": [4.0, 1.2]}],
    "checkpoint": "step-00000002",
    "state": {"progress": {"step": 2, "tokens": 512}},
    "tensors": {"model.embedding.weight": "torch.float32 [64x32] 00ff"},
    "fields": {"finished": ["event", "step"]},
    "terminal": "",
    "seconds": 1.0,
}


def changed(*path: Any, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(RESULT)
    place = result
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return result


def test_clock_and_terminal_output_do_not_affect_equality() -> None:
    assert first_difference(RESULT, changed("seconds", value=9.0) | {"terminal": "warning"}) is None


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("codes", 0, 1), 1, "exit codes [[0, 0]] -> [[0, 1]]"),
        (("metrics", 1, "loss"), math.nextafter(4.1, 5), "step 2: loss: 4.1 -> 4.1000000000000005"),
        (("metrics", 1, "grad_norm"), 1.0, "step 2: grad_norm: NaN -> 1.0"),
        (("metrics", 0, "tokens"), 256, "step 1: tokens is new"),
        (("metrics",), RESULT["metrics"][:1], "2 -> 1 lines"),
        (("decisions", 0, "limits", 1), 1.3, "spike: limits: [4.0, 1.2] -> [4.0, 1.3]"),
        (("decisions",), [], "spike -> "),
        (("checkpoint",), "step-00000001", "last checkpoint step-00000002 -> step-00000001"),
        (
            ("tensors", "model.embedding.weight"),
            "torch.float32 [64x32] 00fe",
            "tensor model.embedding.weight",
        ),
        (("tensors",), {}, "tensor model.embedding.weight is missing"),
        (("state", "progress", "tokens"), 512.0, "progress.tokens: 512 -> 512.0"),
        (("fields", "finished"), ["event"], "fields of finished"),
    ],
)
def test_a_changed_bit_is_found_and_named(path: tuple[Any, ...], value: Any, named: str) -> None:
    difference = first_difference(RESULT, changed(*path, value=value))
    assert difference is not None and named in difference


def test_a_run_without_a_result_is_a_difference() -> None:
    difference = first_difference(RESULT, {"failure": "Traceback", "seconds": 0.0})
    assert difference is not None and "Traceback" in difference


@pytest.mark.slow
def test_a_run_recorded_twice_is_equal_and_a_change_in_the_record_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "record.json"
    only = ["--only", "zero1, continued"]
    assert main(["record", "--output", str(file), *only]) == 0
    assert main(["compare", str(file)]) == 0
    document = json.loads(file.read_text())
    [result] = document["results"].values()
    line = result["metrics"][2]
    line["loss"] = math.nextafter(line["loss"], 0.0)
    file.write_text(json.dumps(document))
    capsys.readouterr()
    assert main(["compare", str(file)]) == 1
    assert "zero1, continued: metrics.jsonl, step 3: loss" in capsys.readouterr().out
