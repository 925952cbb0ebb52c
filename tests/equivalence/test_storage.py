"""bfloat16 as the only copy of the weights loses small updates; float32 storage, the default, keeps them."""

from __future__ import annotations

import pytest
import torch

from forge.config import check_world, parse_toml_text
from forge.optim import build_optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.mesh import make_meshes
from tests.support.equivalence import config_batches, tiny_config
from tests.support.harness import run_ranks


def _norm_weights_after(rank: int, world: int, text: str) -> tuple[torch.dtype, float]:
    """Return the norm weight's dtype, and its change from 1.0 in three steps of AdamW with lr 1e-3."""
    config = parse_toml_text(text)
    meshes = make_meshes(check_world(config, world), "cpu")
    model = build_parallel_model(config, meshes, torch.device("cpu"))
    optimizer = build_optimizer(model.shards, config.optimizer)
    for batch in config_batches(config, meshes.data_rank, meshes.data_ranks):
        model.forward_backward(batch, model.count_tokens(batch))
        model.finalize_gradients()
        optimizer.step(1e-3, torch.zeros(()))
        model.after_update()
        model.zero_gradients()
    norms = [shard for shard in model.shards if shard.name == "norm.weight" and shard.boxes]
    return norms[0].data.dtype, max((shard.data.float() - 1).abs().min().item() for shard in norms)


def _moved(storage: str, world: int) -> float:
    text = tiny_config(micro=4)
    section = text.index("[precision]"), text.index("[data]")
    formats = f'[precision]\nstorage = "{storage}"\ncompute = "bfloat16"\nreduce = "float32"\n'
    results = run_ranks(_norm_weights_after, world, text[: section[0]] + formats + text[section[1] :])
    assert {dtype for dtype, _ in results} == {getattr(torch, storage)}
    return min(moved for _, moved in results)


def every_norm_weight_moves(storage: str, world: int) -> None:
    assert _moved(storage, world) > 1e-4


@pytest.mark.parametrize("world", [1, 2])
def test_a_norm_weight_at_one_moves_by_small_steps(world: int) -> None:
    every_norm_weight_moves("float32", world)


def test_bfloat16_as_the_only_copy_of_the_weights_is_detected() -> None:
    # The spacing of bfloat16 below 1 is 1/256, so three steps of 0.001 round back to 1.
    with pytest.raises(AssertionError):
        every_norm_weight_moves("bfloat16", 1)
    assert _moved("bfloat16", 1) == 0.0


def test_float32_storage_is_the_default() -> None:
    text = tiny_config()
    defaults = parse_toml_text(text[: text.index("[precision]")] + text[text.index("[data]") :]).precision
    assert (defaults.storage, defaults.compute, defaults.reduce) == ("float32", "bfloat16", "float32")
