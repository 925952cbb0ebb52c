"""The reading lists of docs/internals/architecture.md contain exactly the files that build the model and run a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.prepare_data import main as prepare
from tests.support import sizes
from tests.support.runs import Run


@pytest.mark.parametrize(("world", "list_name"), [(1, "one process"), (2, "several processes")])
def test_the_reading_list_is_exactly_the_files_of_a_run(world: int, list_name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {number}\n" for number in range(20_000)))
    given = ["--input", str(tmp_path / "text.txt"), "--tokenizer=bytes", "--output", str(tmp_path / "data")]
    assert prepare(given) == 0
    options = ["--config=debug.toml", "--run.name=run", f'--data.sources=[{{path="{tmp_path}/data"}}]']
    options += [
        "--data.tokenizer=bytes",
        "--data.validation=[]",
        "--evaluate.sample_interval=0",
        "--train.steps=3",
    ]
    run = Run(tmp_path / "folder", base=options)
    assert run.start(world=world, patch="tests.support.traced:trace").join() == [0] * world
    traced = json.loads((run.path / "traced.0.json").read_text())
    listed = sizes.reading_list("one process")
    if world > 1:
        listed |= sizes.reading_list("several processes")
    reports = sizes.reading_list("reports")
    assert not set(traced["trains"]) - listed, (
        "add them to docs/internals/architecture.md, or make the path shorter"
    )
    assert not set(traced["reports"]) - listed - reports, (
        "add them to the reports of docs/internals/architecture.md"
    )
    assert not sizes.reading_list(list_name) - set(traced["trains"]), "they do not run: remove them"
