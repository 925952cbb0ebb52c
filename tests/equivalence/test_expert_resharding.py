"""Any layout of experts continues any other's checkpoint: every expert, its moments and every router's state."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.config import check_world, parse_toml_text
from forge.optim import build_optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.mesh import make_meshes
from forge.run.restore import load_training_state
from forge.run.resume import ResumePoint
from forge.shard import Box
from forge.train.state import all_tensors
from tests.support.equivalence import STEPS, TOLERANCE, whole
from tests.support.harness import run_ranks
from tests.support.layouts import experts_text as text
from tests.support.layouts import slow_unless
from tests.support.resharding import SAVED_AFTER, train_part

# Name -> (ranks, keys of the layout).
LAYOUTS = {
    "one process": (1, ""),
    "ep 2": (2, "ep = 2"),
    "ep 4": (4, "ep = 4"),
    "fsdp 4": (4, ""),
    "tp 2, ep 4": (4, "tp = 2\nep = 4"),
    "hsdp, ep 2": (4, "dp_replicate = 2\ndp_shard = 2\nep = 2"),
    "ep 8": (8, "ep = 8"),
}
BALANCE = ["bias", "aux_loss"]


# Out of tensor and expert parallelism, and into them.
FAST = [("ep 4", "one process"), ("ep 4", "tp 2, ep 4"), ("fsdp 4", "ep 4")]


def pairs() -> list[Any]:
    """Return pairs: one process and ep = 4 to every layout and back, and each layout to the next. Some are slow."""
    ring = set(itertools.pairwise([*LAYOUTS, "one process"]))
    found = []
    for pair in itertools.product(LAYOUTS, LAYOUTS):
        fast = pair in FAST
        if pair in ring or {"one process", "ep 4"} & set(pair):
            found.append(pytest.param(*pair, marks=[] if fast else pytest.mark.slow))
    return found


@functools.cache
def uninterrupted(variant: str) -> dict:
    return run_ranks(train_part, 1, text(variant), "nowhere", 0, STEPS)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """Return a function from a layout to the folder of its checkpoint, cached."""

    @functools.cache
    def save(name: str, variant: str) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        world, parallel = LAYOUTS[name]
        run_ranks(train_part, world, text(variant, parallel), str(folder), 0, SAVED_AFTER)
        return folder

    return save


@pytest.mark.parametrize(("written", "loaded"), pairs())
def test_any_expert_layout_continues_any_others_checkpoint(written: str, loaded: str, saved) -> None:
    variant = BALANCE[(len(written) + len(loaded)) % 2]
    world, parallel = LAYOUTS[loaded]
    folder = str(saved(written, variant))
    results = run_ranks(train_part, world, text(variant, parallel), folder, SAVED_AFTER, STEPS)
    for result in results:
        _continues(result, variant)


def _continues(result: dict, variant: str) -> None:
    expected = uninterrupted(variant)
    assert result["losses"] == pytest.approx(expected["losses"][SAVED_AFTER:], rel=0, abs=TOLERANCE)
    assert result["parameters"].keys() == expected["parameters"].keys()
    for name, parameter in result["parameters"].items():
        difference = (parameter - expected["parameters"][name]).abs().max().item()
        assert difference <= TOLERANCE, f"{name}: differs by {difference:.3e}"


def _loaded(rank: int, world: int, keys: str, folder: str) -> dict[str, torch.Tensor]:
    """Load the checkpoint in `folder` under this layout; return all its tensors."""
    config = parse_toml_text(keys)
    model = build_parallel_model(config, make_meshes(check_world(config, world), "cpu"), torch.device("cpu"))
    optimizer = build_optimizer(model.shards, config.optimizer)
    state = {"progress": {"step": SAVED_AFTER}, "optimizer": {"updates": SAVED_AFTER}}
    load_training_state(ResumePoint(Path(folder) / f"step-{SAVED_AFTER:08d}", state), model, optimizer)
    return {name: whole(shard, values) for name, (shard, values) in all_tensors(model, optimizer).items()}


READ = [("ep 2", "bias"), ("ep 4", "aux_loss")]


@pytest.mark.parametrize(
    ("loaded", "variant"),
    [
        pytest.param(*case, marks=slow_unless(case in READ))
        for case in itertools.product(("ep 2", "ep 4", "fsdp 4", "ep 8"), BALANCE)
    ],
)
def test_every_layout_reads_the_same_numbers(loaded: str, variant: str, saved) -> None:
    folder = str(saved("ep 4", variant))
    (alone,) = run_ranks(_loaded, 1, text(variant), folder)
    router, expert = "layers.1.feed_forward.router", "layers.1.feed_forward.experts.w13"
    moved = alone[f"model.{router}.bias"] if variant == "bias" else alone[f"model.{router}.previous_counts"]
    assert moved.any() and alone[f"optimizer.{expert}.exp_avg"].any()
    world, parallel = LAYOUTS[loaded]
    for found in run_ranks(_loaded, world, text(variant, parallel), folder):
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[name], values) for name, values in alone.items())


def _with_local_indices(rank: int, world: int, keys: str, folder: str, begin: int, end: int) -> dict:
    """Save each rank's experts under local indices, so only one rank's survive."""
    from forge.run import restore
    from tests.support import resharding

    everything = restore.all_tensors

    def renumbered(model: Any, optimizer: Any) -> dict:
        tensors = everything(model, optimizer)
        for name, (shard, values) in tensors.items():
            if shard.kind == "expert":
                first = tuple(Box((0,) * len(box.offsets), box.sizes) for box in shard.boxes)
                tensors[name] = replace(shard, boxes=first, global_shape=shard.data.shape), values
        return tensors

    restore.all_tensors = resharding.all_tensors = renumbered
    return train_part(rank, world, keys, folder, begin, end)


@pytest.mark.slow
def test_experts_saved_under_local_indices_are_detected(tmp_path: Path) -> None:
    keys = text("bias", "ep = 4")
    run_ranks(_with_local_indices, 4, keys, str(tmp_path), 0, SAVED_AFTER)
    with pytest.raises(AssertionError, match="comparison failed"):
        _continues(run_ranks(_with_local_indices, 4, keys, str(tmp_path), SAVED_AFTER, STEPS)[0], "bias")
