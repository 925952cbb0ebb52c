"""Build a configuration's model on this rank, with its meshes and batches, and make optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from forge.batch import Batch
from forge.config import Config, check_world, parse_toml_text
from forge.optim import Optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.engines.buffered import Buffered
from forge.parallel.engines.fsdp import FullySharded
from forge.parallel.layout import Layout, make_layout
from forge.parallel.mesh import Meshes, make_meshes
from forge.parallel.step.gradients import report_gradients
from forge.parallel.step.model import ParallelModel
from forge.train.step import apply_gradients, compute_gradients
from tests.support.equivalence import config_batches, wholes


class Built(NamedTuple):
    """A model (the layout's ParallelModel) with its meshes and batches. `built` returns it; collective."""

    model: Any
    config: Config
    meshes: Meshes

    def batches(self) -> Iterator[Any]:
        """Yield this rank's batch of each step."""
        return config_batches(self.config, self.meshes.data_rank, self.meshes.data_ranks)


def layout_without_ranks(config: Config) -> Layout:
    """Return the Layout of `config` for code without meshes."""
    return make_layout(config, None)  # type: ignore[arg-type]


def built(text: str, world: int) -> Built:
    config = parse_toml_text(text)
    meshes = make_meshes(check_world(config, world), "cpu")
    return Built(build_parallel_model(config, meshes, torch.device("cpu")), config, meshes)


def optimizer_step(
    model: ParallelModel, optimizer: Optimizer, batch: Batch, lr: float, max_norm: float
) -> None:
    """Make one step on the global batch. Skip the update if a gradient or the loss is not finite. Collective.

    batch: this data rank's part of the global batch.
    """
    sums = compute_gradients(model, batch)
    report = report_gradients(model.shards, sums.objective, stop=False)
    apply_gradients(model, optimizer, report, lr, max_norm)


def built_on_nan(rank: int, world: int, text: str) -> dict[str, torch.Tensor]:
    """Build a model in memory full of NaN. Return all its parameters and buffers."""
    for engine in (FullySharded, Buffered):
        engine.allocate = _filling_with_nan(engine.allocate)
    model = built(text, world).model
    tensors = wholes(model.shards, [s.data for s in model.shards])
    tensors |= {name: buffer.clone() for part in model.parts for name, buffer in part.named_buffers()}
    assert any("rope" in name or "cos" in name for name in tensors), "expected RoPE tables among the buffers"
    left = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    assert not left, f"not initialised: {left}"
    return tensors


def _filling_with_nan(allocate: Callable[..., None]) -> Callable[..., None]:
    def allocate_and_fill(engine: Any, device: torch.device) -> None:
        allocate(engine, device)
        for tensor in [*(shard.data for shard in engine.shards), *engine._model.buffers()]:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 7777)

    return allocate_and_fill
