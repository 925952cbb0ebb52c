"""Int8 moments: losses and parameters equal one process, on layouts with cut blocks and across checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.support.buffers import SMALL
from tests.support.equivalence import STEPS, TOLERANCE, tiny_config
from tests.support.harness import run_ranks
from tests.support.resharding import SAVED_AFTER, train_part

INT8 = '\n[optimizer]\nmoment_dtype = "int8"\n'
# Name -> saving and continuing (ranks, layout). tp and contiguous buffers cut blocks; fsdp2 alone does not.
MOVES = {
    "tp to zero1": ((2, "tp = 2"), (2, f'data_parallel = "zero1"{SMALL}')),
    "zero1 to one process": ((4, f'data_parallel = "zero1"\ndp_replicate = 2{SMALL}'), (1, "")),
    "pp to tp in replicas": ((2, "pp = 2"), (4, "tp = 2\ndp_replicate = 2")),
}


@pytest.mark.parametrize(
    "move", [pytest.param(move, marks=() if move == "tp to zero1" else pytest.mark.slow) for move in MOVES]
)
def test_a_run_moved_between_layouts_equals_one_process(move: str, tmp_path: Path) -> None:
    (world, layout), (other_world, other_layout) = MOVES[move]
    whole = _uninterrupted()
    before = run_ranks(train_part, world, text(layout), str(tmp_path), 0, SAVED_AFTER)
    assert before[0]["losses"] == pytest.approx(whole["losses"][:SAVED_AFTER], rel=0, abs=TOLERANCE)
    for found in run_ranks(train_part, other_world, text(other_layout), str(tmp_path), SAVED_AFTER, STEPS):
        assert found["losses"] == pytest.approx(whole["losses"][SAVED_AFTER:], rel=0, abs=TOLERANCE)
        for name, parameter in whole["parameters"].items():
            difference = (found["parameters"][name] - parameter).abs().max().item()
            assert difference <= TOLERANCE, f"{name}: differs by {difference:.3e}"


def text(layout: str) -> str:
    return tiny_config(parallel=layout, micro=2) + INT8


@functools.cache
def _uninterrupted() -> dict[str, Any]:
    return run_ranks(train_part, 1, text(""), "nowhere", 0, STEPS)[0]
