"""Train and save under one layout, load under another, go on: the history of one process that was never stopped.

With AdamW, so that its moments and counters have to move as well; every layout in LAYOUTS with every other.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.checkpoint import Checkpoints
from forge.config import check_world, parse_toml_text
from forge.optim import build_optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.gradients import clip_gradients, report_gradients
from forge.parallel.mesh import make_meshes
from forge.train.resume import Origin, all_tensors, load_origin
from tests.support.equivalence import STEPS, TOLERANCE, _batches, tiny_config, wholes
from tests.support.harness import run_ranks

# Name -> ranks, and what the layout says.
LAYOUTS = {
    "one process": (1, ""),
    "fsdp 2": (2, ""),
    "tp 2": (2, "tp = 2"),
    "cp 2": (2, "cp = 2"),
    "fsdp 4, deferred": (4, "defer_gradient_reduction = true"),
    "hsdp 2x2": (4, "dp_replicate = 2\ndp_shard = 2"),
    "replicas, offloaded": (2, "dp_replicate = 2\ndp_shard = 1\ncpu_offload = true"),
}
SAVED_AFTER, LR = 2, 1e-2


def _pairs() -> list[Any]:
    """All of them; each layout with two others is part of every run, the rest of the slow one."""
    names = list(LAYOUTS)
    near = {(a, b) for i, a in enumerate(names) for b in (names[(i + 1) % len(names)], names[i - 2])}
    pairs = [(a, b) for a in names for b in names]
    return [pytest.param(*pair, marks=[] if pair in near else pytest.mark.slow) for pair in pairs]


def _train(
    rank: int, world: int, text: str, folder: str, begin: int, end: int
) -> dict[str, list[float] | dict]:
    """Steps begin + 1 to end: loaded before them unless they are the first, saved after them unless they are the last.

    Returns their losses, and all parameters after them.
    """
    config = parse_toml_text(text)
    meshes = make_meshes(check_world(config, world), "cpu")
    model = build_parallel_model(config, meshes, torch.device("cpu"))
    optimizer = build_optimizer(model.shards, config.optimizer)
    checkpoints = Checkpoints(Path(folder), mode="sync")
    if begin:
        for shard in model.shards:
            shard.data.fill_(float("nan"))
        state = {"progress": {"step": begin}, "optimizer": {"updates": begin}}
        load_origin(Origin(checkpoints.path(begin), state), model, optimizer)
    losses = []
    for step, batch in enumerate(_batches(config, meshes.data_rank, meshes.data_ranks)):
        if not begin <= step < end:
            continue
        sums = model.forward_backward(batch, model.count_tokens(batch))
        model.finalize_gradients()
        report = report_gradients(model.shards, sums.objective, stop=False)
        clip_gradients(model.shards, report.norm, 1.0)
        optimizer.step(LR, report.skip)
        model.after_update()
        model.update_router(report.skip)
        model.zero_gradients()
        losses.append((sums.cross_entropy / sums.tokens).item())
    if end < STEPS:
        (outcome,) = checkpoints.save(end, all_tensors(model, optimizer), optimizer.state(), {}, {})
        assert outcome.error is None, outcome.error
    return {"losses": losses, "parameters": wholes(model.shards, [s.data for s in model.shards])}


@functools.cache
def uninterrupted() -> dict:
    return run_ranks(_train, 1, tiny_config(), "nowhere", 0, STEPS)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """Folder of the checkpoint that a layout wrote, made once."""

    @functools.cache
    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        world, parallel = LAYOUTS[name]
        run_ranks(_train, world, tiny_config(parallel=parallel), str(folder), 0, SAVED_AFTER)
        return folder

    return save


@pytest.mark.parametrize(("written", "loaded"), _pairs())
def test_r2_what_one_layout_saved_another_continues(written: str, loaded: str, saved) -> None:
    world, parallel = LAYOUTS[loaded]
    expected = uninterrupted()
    text, folder = tiny_config(parallel=parallel), str(saved(written))
    for result in run_ranks(_train, world, text, folder, SAVED_AFTER, STEPS):
        assert result["losses"] == pytest.approx(expected["losses"][SAVED_AFTER:], rel=0, abs=TOLERANCE)
        assert result["parameters"].keys() == expected["parameters"].keys()
        for name, parameter in result["parameters"].items():
            # AdamW divides by the root of the second moment, so a rounding of 1e-16 grows where a gradient is tiny.
            difference = (parameter - expected["parameters"][name]).abs().max().item()
            assert difference <= TOLERANCE, f"{name}: differs by {difference:.3e}"
