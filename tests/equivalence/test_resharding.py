"""Train and save under one layout, load and continue under another: equal to one uninterrupted process.

AdamW's moments and counters move too. Every layout of LAYOUTS is paired with every other.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.support.equivalence import STEPS, TOLERANCE, tiny_config
from tests.support.harness import run_ranks
from tests.support.resharding import SAVED_AFTER, train_part

# Name -> (ranks, keys of the layout).
LAYOUTS = {
    "one process": (1, ""),
    "fsdp 2": (2, ""),
    "tp 2": (2, "tp = 2"),
    "cp 2": (2, "cp = 2"),
    "fsdp 4, deferred": (4, "defer_gradient_reduction = true"),
    "hsdp 2x2": (4, "dp_replicate = 2\ndp_shard = 2"),
    "replicas, offloaded": (2, "dp_replicate = 2\ndp_shard = 1\ncpu_offload = true"),
}


def _pairs() -> list[Any]:
    """Return all pairs. In the fast ones, every layout saves or loads once."""
    names = list(LAYOUTS)
    near = set(zip(names[::2], names[1::2] + names[: len(names) % 2], strict=True))
    pairs = [(a, b) for a in names for b in names]
    return [pytest.param(*pair, marks=[] if pair in near else pytest.mark.slow) for pair in pairs]


@functools.cache
def uninterrupted() -> dict:
    return run_ranks(train_part, 1, tiny_config(), "nowhere", 0, STEPS)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """Return a function from a layout to the folder of its checkpoint, cached."""

    @functools.cache
    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        world, parallel = LAYOUTS[name]
        run_ranks(train_part, world, tiny_config(parallel=parallel), str(folder), 0, SAVED_AFTER)
        return folder

    return save


@pytest.mark.parametrize(("written", "loaded"), _pairs())
def test_r2_any_layout_continues_any_others_checkpoint(written: str, loaded: str, saved) -> None:
    world, parallel = LAYOUTS[loaded]
    expected = uninterrupted()
    text, folder = tiny_config(parallel=parallel), str(saved(written))
    for result in run_ranks(train_part, world, text, folder, SAVED_AFTER, STEPS):
        assert result["losses"] == pytest.approx(expected["losses"][SAVED_AFTER:], rel=0, abs=TOLERANCE)
        assert result["parameters"].keys() == expected["parameters"].keys()
        for name, parameter in result["parameters"].items():
            # AdamW divides by the square root of the second moment, which amplifies a rounding of 1e-16 for tiny gradients.
            difference = (parameter - expected["parameters"][name]).abs().max().item()
            assert difference <= TOLERANCE, f"{name}: differs by {difference:.3e}"
