"""Experts with a capacity limit: equal microbatches drop the same tokens on any layout, and evaluation drops none."""

import functools

import pytest
import torch

from forge.config import check_world, parse_toml_text
from forge.data.build import open_data
from forge.parallel.build import build_parallel_model
from forge.parallel.mesh import make_meshes
from forge.train.evaluate import held_out_losses
from tests.support.equivalence import WholeRecord, alone, assert_equal, layout, routers
from tests.support.harness import run_ranks
from tests.support.layouts import experts_text as text

LIMITED = "[model.moe]\ncapacity_factor = 0.75\n"


def limited(parallel: str = "", micro: int = 1) -> str:
    return text("bias", parallel, micro).replace("[model.moe]\n", LIMITED)


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (4, "ep = 2"),
        pytest.param(2, 'data_parallel = "zero1"\nep = 2', marks=pytest.mark.slow),
        (2, "pp = 2"),
        pytest.param(4, "dp_replicate = 2\ndp_shard = 2\nep = 2", marks=pytest.mark.slow),
    ],
)
def test_with_a_capacity_microbatches_of_whole_sequences_drop_the_same_on_any_layout(
    world: int, parallel: str
) -> None:
    ranks = layout(limited(parallel), world)
    assert_equal(ranks, _limited_in_one_process())
    assert all(step["layers.1"][10] > 0 for step in routers(ranks))


@functools.cache
def _limited_in_one_process() -> WholeRecord:
    return alone(limited())


HELD_OUT = "[evaluate]\ninterval = 1\nsequences = 5\n"


@pytest.mark.parametrize(
    ("world", "parallel", "micro"),
    [
        (1, "", 4),
        pytest.param(4, "ep = 2", 1, marks=pytest.mark.slow),
        (2, "tp = 2\nep = 2", 2),
        (2, "cp = 2\nep = 2", 2),
        (2, "pp = 2", 2),
    ],
)
def test_evaluation_with_a_capacity_depends_on_no_layout_and_no_microbatch(
    world: int, parallel: str, micro: int
) -> None:
    (expected,) = run_ranks(_held_out, 1, text("bias") + HELD_OUT)
    for loss in run_ranks(_held_out, world, limited(parallel, micro) + HELD_OUT):
        assert loss == pytest.approx(expected, abs=1e-9, rel=0)


def _held_out(rank: int, world: int, keys: str) -> float:
    """Return the loss on five held-out sequences. Padding fills the last microbatches."""
    held_out = 'validation = [{name = "held", path = "synthetic"}]\ndocument_mask'
    config = parse_toml_text(keys.replace("document_mask", held_out))
    meshes = make_meshes(check_world(config, world), "cpu")
    model = build_parallel_model(config, meshes, torch.device("cpu"))
    data, device = open_data(config), torch.device("cpu")
    return held_out_losses(model, data.validation, config, meshes, device)["held"]
