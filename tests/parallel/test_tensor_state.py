"""Under tensor parallelism initial values equal one process bit for bit, and checkpoints load on any layout."""

from pathlib import Path

import pytest
import torch

from forge.checkpoint import Checkpoints, load
from tests.support.building import built, built_on_nan
from tests.support.equivalence import tiny_config, whole
from tests.support.harness import run_ranks

MODELS = {
    "plain": "",
    "everything": "tie_embeddings = true\nqk_norm = true\nattention_bias = true\nsliding_window = 24\n",
}


@pytest.mark.parametrize("model", [pytest.param("plain", marks=pytest.mark.slow), "everything"])
@pytest.mark.parametrize(
    ("world", "keys"),
    [(2, "tp = 2"), (4, "tp = 2"), (4, "tp = 2\ndp_replicate = 2\nsequence_parallel = false")],
)
def test_memory_full_of_nan_is_written_over_identically(model: str, world: int, keys: str) -> None:
    values = run_ranks(built_on_nan, world, tiny_config(model=MODELS[model], parallel=keys))
    single = run_ranks(built_on_nan, 1, tiny_config(model=MODELS[model]))[0]
    for of_rank in values:
        for name, tensor in single.items():
            assert torch.equal(of_rank[name], tensor), name


def shards_of(world: int, keys: str, seed: int) -> list:
    text = tiny_config(parallel=keys, model=MODELS["everything"]) + f"[run]\nseed = {seed}\n"
    return built(text, world).model.shards


def save_in(rank: int, world: int, folder: str, keys: str) -> dict[str, torch.Tensor]:
    shards = shards_of(world, keys, seed=1)
    (outcome,) = Checkpoints(Path(folder), mode="sync").save(
        1, {shard.name: (shard, shard.data) for shard in shards}, {}, {}, {}
    )
    assert outcome.error is None, outcome.error
    return {shard.name: whole(shard, shard.data) for shard in shards}


def load_in(rank: int, world: int, folder: str, keys: str) -> dict[str, torch.Tensor]:
    shards = shards_of(world, keys, seed=2)
    load(Path(folder) / "step-00000001", {shard.name: (shard, shard.data) for shard in shards})
    return {shard.name: whole(shard, shard.data) for shard in shards}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((4, "tp = 2\ndp_shard = 2"), (1, "")),
        ((1, ""), (4, "tp = 2\ndp_shard = 2")),
        pytest.param((2, "tp = 2"), (4, "tp = 2\ndp_replicate = 2"), marks=pytest.mark.slow),
        pytest.param((2, "dp_shard = 2"), (2, "tp = 2\nsequence_parallel = false"), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_moves_between_layouts(tmp_path, saved, loaded) -> None:
    expected = run_ranks(save_in, saved[0], str(tmp_path), saved[1])[0]
    for actual in run_ranks(load_in, loaded[0], str(tmp_path), loaded[1]):
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
