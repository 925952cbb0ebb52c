"""Any pipeline, or none, continues any other's checkpoint: other stages, schedules and axes, with optimizer and routers."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest

from tests.support.equivalence import STEPS, TOLERANCE
from tests.support.harness import run_ranks
from tests.support.layouts import pipeline_text, slow_unless
from tests.support.resharding import SAVED_AFTER, train_part

MODEL = "tied experts"
# Name -> (ranks, configuration).
LAYOUTS = {
    "one process": (1, pipeline_text(1, "1F1B", MODEL)),
    "1F1B": (2, pipeline_text(2, "1F1B", MODEL)),
    "interleaved over 4": (4, pipeline_text(4, "Interleaved1F1B", MODEL)),
    "V with fsdp": (4, pipeline_text(2, "ZBVZeroBubble", MODEL)),
    "tp and ep": (4, pipeline_text(2, "InterleavedZeroBubble", MODEL, parallel="tp = 2\nep = 2")),
    "zero1": (4, pipeline_text(2, "1F1B", MODEL, parallel="data_parallel = 'zero1'")),
    "no pipeline, fsdp": (2, pipeline_text(1, "1F1B", MODEL)),
}


def _pairs() -> list:
    """Return pairs: each layout with the next one and with one process, in both directions. Most are slow."""
    near = {*itertools.pairwise([*LAYOUTS, "one process"]), ("interleaved over 4", "one process")}
    fast = {("interleaved over 4", "V with fsdp")}
    pairs = [(a, b) for a in LAYOUTS for b in LAYOUTS if (a, b) in near or "one process" in (a, b)]
    return [pytest.param(*pair, marks=slow_unless(pair in fast)) for pair in pairs]


@functools.cache
def uninterrupted() -> dict:
    return run_ranks(train_part, 1, LAYOUTS["one process"][1], "nowhere", 0, STEPS)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """Return a function from a layout to the folder of its checkpoint, cached."""

    @functools.cache
    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        run_ranks(train_part, LAYOUTS[name][0], LAYOUTS[name][1], str(folder), 0, SAVED_AFTER)
        return folder

    return save


@pytest.mark.parametrize(("written", "loaded"), _pairs())
def test_any_pipeline_continues_any_others_checkpoint(written: str, loaded: str, saved) -> None:
    world, text = LAYOUTS[loaded]
    expected = uninterrupted()
    for result in run_ranks(train_part, world, text, str(saved(written)), SAVED_AFTER, STEPS):
        assert result["losses"] == pytest.approx(expected["losses"][SAVED_AFTER:], rel=0, abs=TOLERANCE)
        assert result["parameters"].keys() == expected["parameters"].keys()
        for name, parameter in result["parameters"].items():
            # AdamW divides by the square root of the second moment, which amplifies a rounding of 1e-16 for tiny gradients.
            difference = (parameter - expected["parameters"][name]).abs().max().item()
            assert difference <= 100 * TOLERANCE, f"{name}: differs by {difference:.3e}"
