"""A tiny model under a data-parallel engine, and configs for the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from forge.config import check_world, parse_toml_text
from forge.parallel.build import build_parallel_model
from forge.parallel.engines.buffered import Buffered, plan
from forge.parallel.mesh import make_meshes
from forge.parallel.step.model import SequentialModel
from forge.tools.verify.record import every_batch
from forge.train.state import all_tensors
from tests.support.building import built
from tests.support.equivalence import tiny_config, whole

ENGINES = ("ddp", "zero1", "zero2")
# Keep fsdp2 in one process. Otherwise contiguous buffers replace fsdp2, and the test would compare them with themselves.
ALONE = '\nreshard_after_forward = "always"'
SMALL = "\nbucket_size = 3000"  # a few buckets in the tiny model of 32,000 parameters

Gradients = dict[str, torch.Tensor]


def engine_config(
    engine: str,
    parallel: str = "",
    *,
    model: str = "",
    micro: int = 1,
    batch: int = 8,
    formats: tuple[str, str, str] = ("float64", "float64", "float64"),
) -> str:
    """Return the tiny model's config under `engine`. formats: storage, compute, reduce."""
    text = tiny_config(parallel=f'data_parallel = "{engine}"\n{parallel}', model=model, micro=micro)
    for key, value in zip(("storage", "compute", "reduce"), formats, strict=True):
        text = text.replace(f'{key} = "float64"', f'{key} = "{value}"')
    return text.replace("global_batch_size = 8", f"global_batch_size = {batch}")


def build(text: str, world: int) -> tuple[SequentialModel, Buffered, Iterator[Any]]:
    """Return this rank's model of `text`, its engine, and an endless iterator of this rank's batches."""
    model, config, meshes = built(text, world)
    return model, model._engines[0], every_batch(config, meshes.data_rank, meshes.data_ranks)


def backward(model: SequentialModel, batch: Any, tokens: float = 100.0) -> None:
    """Compute the complete gradients of one step. Collective: the engine's collectives, and one for the loss."""
    model.forward_backward(batch, torch.tensor(tokens, dtype=torch.float64))
    model.finalize_gradients()


def state(model: SequentialModel, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return a copy of this rank's parameters and optimizer state, i.e. of a checkpoint's content."""
    return {name: values.clone() for name, (_, values) in all_tensors(model, optimizer).items()}


def gradients(model: SequentialModel) -> Gradients:
    return {shard.name: whole(shard, shard.grad) for shard in model.shards}


def assert_close_gradients(actual: Gradients, expected: Gradients, tolerance: float = 1e-11) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (actual[name] - gradient).abs().max().item()
        assert difference <= tolerance, f"{name}: differs by {difference:.3e}"


def gradients_of_two_steps(rank: int, world: int, text: str) -> list[Gradients]:
    model, _, batches = build(text, world)
    found = []
    for _ in range(2):
        backward(model, next(batches))
        found.append(gradients(model))
        for shard in model.shards:
            shard.data.sub_(0.1 * shard.grad.to(shard.data.dtype))
        model.after_update()
        model.zero_gradients()
    return found


def with_collectives(device: torch.device, text: str) -> list[torch.Tensor]:
    """Return the losses of two steps and the final parameters, in one process whose groups count as larger groups.

    So every collective runs, through the back-end of `device` and on its streams. It returns its input.
    """
    several, plan._several = plan._several, lambda *groups: groups
    try:
        return plain_steps(device, text)
    finally:
        plan._several = several


def plain_steps(device: torch.device, text: str) -> list[torch.Tensor]:
    config = parse_toml_text(text)
    model = build_parallel_model(config, make_meshes(check_world(config, 1), device.type), device)
    found = []
    for _, batch in zip(range(2), every_batch(config), strict=False):
        batch = batch.to(device)
        found.append(model.forward_backward(batch, model.count_tokens(batch)).values)
        model.finalize_gradients()
        for shard in model.shards:
            shard.data.sub_(0.1 * shard.grad.to(shard.data.dtype))
        model.after_update()
        model.zero_gradients()
    return [values.cpu() for values in (*found, *(shard.data for shard in model.shards))]
